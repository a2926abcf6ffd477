"""Named tensors into parameters: each name is used exactly once, and each part of each parameter is written once."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError, nearest
from nanovllm.layers.linear import MergedLinear
from nanovllm.models import find_model

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Buffers that old checkpoints carry and that are computed here."""


def build_model(config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Build a model with parameters allocated but not written."""
    with torch.device("meta"):
        model = find_model(config.architecture)(config, max_model_len)
    model.to(dtype).to_empty(device=device)
    for rotary in model.rotaries:
        rotary.to(device)
    return model


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, progress: bool = False) -> None:
    """Write a checkpoint's tensors into the model and make it ready to run.

    Raises CheckpointError for a name that the model does not have, a shape that differs, a tensor given twice,
    and names that are missing at the end.
    """
    targets = parameter_slices(model)
    missing = dict.fromkeys(targets)
    tied = "lm_head.weight" not in targets
    with tqdm(total=len(targets), desc="Loading weights", unit=" tensors", disable=not progress, leave=False) as bar:
        for name, tensor in tensors:
            if name.endswith(IGNORED_SUFFIXES) or (tied and name == "lm_head.weight"):
                continue
            if name not in targets:
                raise CheckpointError(
                    f"the checkpoint has a tensor {name!r} that the model has no place for.{nearest(name, targets)} "
                    "Is config.json the one that belongs to these weights?"
                )
            if name not in missing:
                raise CheckpointError(f"the checkpoint has the tensor {name!r} twice.")
            target = targets[name]
            if tensor.shape != target.shape:
                raise CheckpointError(
                    f"tensor {name!r} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}."
                )
            target.copy_(tensor)
            del missing[name]
            bar.update()
    if missing:
        some = ", ".join(list(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(targets)} tensors: {some}. Fetch the missing files."
        )
    prepare(model)


def draw_weights(model: nn.Module, seed: int) -> None:
    """Fill the model with small random numbers: as good as real ones for timing, of no use for answers."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    prepare(model)


def prepare(model: nn.Module) -> None:
    """Let each module that asks for it rearrange its loaded weights."""
    for module in model.modules():
        rearrange = getattr(module, "prepare", None)
        if callable(rearrange):
            rearrange()


def parameter_slices(model: nn.Module) -> dict[str, Tensor]:
    """Map each checkpoint name to the memory it is written to: a parameter, or a merged layer's rows."""
    targets: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                parent = path.rpartition(".")[0]
                pieces = parameter.data.split(list(module.parts.values()))
                targets |= {f"{parent}.{part}.{kind}": piece for part, piece in zip(module.parts, pieces, strict=True)}
            else:
                targets[f"{path}.{kind}"] = parameter.data
    return targets

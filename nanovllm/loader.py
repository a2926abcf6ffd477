"""Named tensors into parameters: each name is used exactly once, and each part of each parameter is written once.

A model is built without memory (on torch's "meta" device). A parameter is allocated when its first part arrives, and
a module is prepared when its last one has: so no more than one layer is ever held in two forms.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
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

CACHE_SCALES = ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")
"""Ends of names that are no parameters but numbers for a cache of float8; ``cache_scales`` in a room reads them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's tensor goes: rows ``[start, stop)`` of a module's parameter."""

    module: nn.Module
    kind: str
    """``weight`` or ``bias``."""
    start: int
    stop: int
    columns: tuple[int, ...] = ()
    """The parameter's other dimensions."""
    taken: tuple[slice, ...] = ()
    """Which part of the tensor goes there, if it is not all of it: only that is read."""
    whole: tuple[int, ...] = ()
    """The tensor's shape, if only a part of it goes there."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        return self.whole or (self.stop - self.start, *self.columns)

    def memory(self, device: torch.device) -> Tensor:
        """Return the rows, on ``device``; allocate the parameter if this is its first part."""
        parameter = getattr(self.module, self.kind)
        if parameter.is_meta:
            parameter = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
            setattr(self.module, self.kind, parameter)
        rows: Tensor = parameter.data[self.start : self.stop]
        return rows


def build_model(config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Build a model whose parameters have a shape and a type but no memory yet."""
    with torch.device("meta"):
        model = find_model(config.architecture)(config, max_model_len)
    model.to(dtype)
    for rotary in model.rotaries:
        rotary.to(device, dtype)
    model.places = parameter_places(model)
    return model


def load_weights(
    model: Any,
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device,
    storage: torch.dtype,
    *,
    deterministic: bool = False,
    progress: bool = False,
) -> dict[str, Tensor]:
    """Write a checkpoint's tensors into a model from ``build_model`` and make it ready to run; return CACHE_SCALES.

    For ``storage`` and ``deterministic`` see ``ops.linear.prepare``. Raises CheckpointError for a name that
    the model does not have, a shape that differs, a tensor given twice, and names that are missing at the end.
    """
    places: dict[str, Place] = model.places
    missing = dict.fromkeys(places)
    parts = Counter(place.module for place in places.values())
    scales: dict[str, Tensor] = {}
    hidden = not progress or sys.stderr is None  # None: a program without a terminal
    with tqdm(total=len(places), desc="Loading weights", unit=" tensors", disable=hidden, leave=False) as bar:
        for name, tensor in tensors:
            if _is_ignored(name, places):
                continue
            if name.endswith(CACHE_SCALES):
                scales[name] = tensor
                continue
            place = _place(name, tensor, places, missing)
            place.memory(device).copy_(tensor[place.taken])
            del missing[name]
            parts[place.module] -= 1
            if parts[place.module] == 0:
                _prepare(place.module, storage, deterministic)
            bar.update()
    if missing:
        some = ", ".join(list(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} of {len(places)} tensors: {some}. Fetch the missing files."
        )
    _prepare_tied(model, storage, deterministic)
    return scales


def update_weights(
    model: Any,
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device,
    storage: torch.dtype,
    *,
    deterministic: bool = False,
) -> None:
    """Write tensors over those of a model that is ready to run; what is not named keeps its values.

    In place: on a GPU in the same memory, on a CPU one layer after the other, each packed anew. ``tensors`` is read to
    its end first: CheckpointError, with nothing changed, for what ``load_weights`` refuses but missing names.
    """
    places: dict[str, Place] = model.places
    missing = dict.fromkeys(places)
    parts: dict[nn.Module, list[tuple[Place, Tensor]]] = {}
    for name, tensor in tensors:
        if _is_ignored(name, places):
            continue
        place = _place(name, tensor, places, missing)
        del missing[name]
        parts.setdefault(place.module, []).append((place, tensor))
    if "model.embed_tokens.weight" not in missing and "lm_head.weight" not in places:
        model.lm_head.restore()
    for module, written in parts.items():
        restore = getattr(module, "restore", None)
        if callable(restore):
            restore()
        for place, tensor in written:
            place.memory(device).copy_(tensor[place.taken])
        _prepare(module, storage, deterministic)
    _prepare_tied(model, storage, deterministic)


def draw_weights(
    model: nn.Module, device: torch.device, storage: torch.dtype, seed: int, *, deterministic: bool = False
) -> None:
    """Fill the model with small random numbers: as good as real ones for timing, of no use for answers."""
    generator = torch.Generator(device).manual_seed(seed)
    for path, module in model.named_modules():
        kinds = [kind for kind, _ in module.named_parameters(recurse=False)]
        for kind in kinds:
            memory = Place(module, kind, 0, getattr(module, kind).shape[0]).memory(device)
            if "norm" in path:
                memory.fill_(1.0)
            else:
                memory.normal_(0.0, 0.02, generator=generator)
        if kinds:
            _prepare(module, storage, deterministic)
    _prepare_tied(model, storage, deterministic)


def parameter_places(model: nn.Module) -> dict[str, Place]:
    """Map each name that a checkpoint must have to its place: a parameter, or a merged layer's rows.

    ``build_model`` keeps the map as ``places``, for parameters are gone once they are prepared.
    """
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            columns = tuple(parameter.shape[1:])
            if not isinstance(module, MergedLinear):
                places[f"{path}.{kind}"] = Place(module, kind, 0, parameter.shape[0], columns)
                continue
            start = 0
            for part, rows in module.parts.items():
                places[f"{path.rpartition('.')[0]}.{part}.{kind}"] = Place(module, kind, start, start + rows, columns)
                start += rows
    return places


def _is_ignored(name: str, places: dict[str, Place]) -> bool:
    """Whether a checkpoint's tensor is computed here, or is the embedding once more."""
    return name.endswith(IGNORED_SUFFIXES) or (name == "lm_head.weight" and name not in places)


def _place(name: str, tensor: Tensor, places: dict[str, Place], missing: dict[str, None]) -> Place:
    """Return where a tensor goes, or say why it goes nowhere."""
    if name not in places:
        raise CheckpointError(
            f"the checkpoint has a tensor {name!r} that the model has no place for.{nearest(name, places)} "
            "Is config.json the one that belongs to these weights?"
        )
    if name not in missing:
        raise CheckpointError(f"the checkpoint has the tensor {name!r} twice.")
    place = places[name]
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise CheckpointError(f"{name!r} holds {found}; it must be a tensor of floating-point numbers.")
    if tuple(tensor.shape) != place.shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(tensor.shape)}; config.json asks for {list(place.shape)}."
        )
    return place


def _prepare(module: nn.Module, storage: torch.dtype, deterministic: bool) -> None:
    rearrange = getattr(module, "prepare", None)
    if callable(rearrange):
        rearrange(storage, deterministic=deterministic)


def _prepare_tied(model: nn.Module, storage: torch.dtype, deterministic: bool) -> None:
    """Prepare a head that reads the embedding: it has no tensor of its own whose arrival would do it."""
    head = model.lm_head
    if isinstance(head, nn.Module) and getattr(head, "_product", None) is None:
        _prepare(head, storage, deterministic)

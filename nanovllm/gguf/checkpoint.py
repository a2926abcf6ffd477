"""A GGUF file as a ``Checkpoint``: Hugging Face's configuration, names and tensor meaning."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from nanovllm.checkpoint import watched
from nanovllm.errors import CheckpointError, nearest
from nanovllm.gguf.architectures import (
    ROPE_FACTORS,
    TOP_NAMES,
    find_architecture,
    read_config,
    tensor_name,
)
from nanovllm.gguf.dequantize import PLAIN, check_type, dequantize
from nanovllm.gguf.reader import GGUFFile
from nanovllm.gguf.tokenizer import build_tokenizer
from nanovllm.tokenizer import TokenizerParts

SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Recommended sampling parameters: key in the file -> key in ``generation_config.json``."""


class GGUFCheckpoint:
    """One GGUF file. Opening reads and checks the header only; weights are read by ``tensors``.

    ``config["rope_scaling"]`` may be of a type that no folder has, because files of Llama 3.1 and later hold
    the result of the scaling and not its parameters:
    ``{"rope_type": "frequency_factors", "factors": [...]}``, head_dim / 2 numbers by which the rotary
    frequencies are divided.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]

    def __init__(self, path: str | Path) -> None:
        """Open ``path``. Raises CheckpointError where it is damaged, incomplete or not supported."""
        self._file = GGUFFile(Path(path))
        self._refuse_parts()
        self._architecture = find_architecture(self._file)
        self.config = read_config(self._file, self._architecture)
        self._names = self._translate_names()
        for tensor in self._file.tensors.values():
            check_type(tensor, str(path))
        stored = {tensor.kind.name for tensor in self._file.tensors.values() if len(tensor.shape) > 1}
        if len(stored) == 1 and stored <= set(PLAIN):  # else it is quantised and has no such type
            self.config["torch_dtype"] = str(PLAIN[stored.pop()]).removeprefix("torch.")
        if ROPE_FACTORS in self._file.tensors:
            self.config["rope_scaling"] = self._rope_factors()
        self.generation_config = self._read_generation_config()

    def tokenizer_parts(self) -> TokenizerParts:
        """Build the tokenizer from the metadata. Raises CheckpointError where it cannot be done."""
        return build_tokenizer(self._file.metadata, str(self._file.path))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter under its Hugging Face name.

        float32, or float16 or bfloat16 where the file has these. Only the tensor that is yielded exists in
        expanded form. Unquantised ones may be views of the file: copy what you keep.
        """
        yield from watched(self._file.path, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for stored, name in self._names.items():
            values = dequantize(self._file, self._file.tensors[stored])
            if self._architecture.interleaved and ".q_proj." in name:
                values = _undo_interleaving(values, self.config["num_attention_heads"])
            elif self._architecture.interleaved and ".k_proj." in name:
                values = _undo_interleaving(values, self.config["num_key_value_heads"])
            elif self._architecture.norms_hold_one and name.endswith("norm.weight"):
                values = values - 1
            yield name, values

    def _refuse_parts(self) -> None:
        parts = self._file.metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise CheckpointError(
                f"{self._file.path} is one of {parts} parts; a model must be one file. "
                "Join them with llama.cpp's llama-gguf-split --merge."
            )

    def _translate_names(self) -> dict[str, str]:
        """Map each stored name to Hugging Face's; raise where one is not known."""
        names: dict[str, str] = {}
        for stored in self._file.tensors:
            if stored == ROPE_FACTORS:
                continue
            name = tensor_name(stored, self._architecture, self.config["num_hidden_layers"])
            if name is None:
                known = [*TOP_NAMES, *(f"blk.0.{part}.weight" for part in self._architecture.layer_names)]
                raise CheckpointError(
                    f"{self._file.path}: tensor {stored!r} has no place in {self._architecture.model_class} "
                    f"of {self.config['num_hidden_layers']} layers.{nearest(stored, known)} "
                    "The model may have a part that is not supported; use its original folder."
                )
            names[stored] = name
        return names

    def _rope_factors(self) -> dict[str, Any]:
        factors = dequantize(self._file, self._file.tensors[ROPE_FACTORS])
        count = self.config["head_dim"] // 2
        if factors.shape != (count,) or not bool((factors > 0).all()):
            raise CheckpointError(
                f"{self._file.path}: {ROPE_FACTORS} has shape {tuple(factors.shape)}; it must hold one "
                f"positive number for each of {count} frequencies. The file is damaged; fetch it again."
            )
        return {"rope_type": "frequency_factors", "factors": factors.float().tolist()}

    def _read_generation_config(self) -> dict[str, Any]:
        metadata = self._file.metadata
        config = {name: metadata[key] for key, name in SAMPLING.items() if key in metadata}
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in config.items()}


def _undo_interleaving(rows: Tensor, heads: int) -> Tensor:
    """Bring the rows of Q or K into the order of rotate-half rotary embedding, head by head.

        stored    a0 b0 a1 b1 a2 b2      pairs that are rotated together lie side by side
        wanted    a0 a1 a2 b0 b1 b2      first halves, then second halves

    Works for biases too. Source: ``LlamaModel.permute`` of llama.cpp's converter; this is its inverse.
    """
    if rows.shape[0] % (2 * heads) != 0:
        raise CheckpointError(
            f"a Q or K projection has {rows.shape[0]} rows; {heads} heads need a multiple of {2 * heads}. "
            "The file is damaged or was not made by llama.cpp's converter; fetch it again."
        )
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

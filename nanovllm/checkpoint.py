"""A model on disk: its configuration, its tokenizer and its named tensors.

``Checkpoint`` is the port; ``FolderCheckpoint`` reads the folders that Hugging Face's libraries write, and
other formats plug in through ``FORMATS`` by file suffix. Nothing here runs code from the model's folder:
``auto_map`` and Python files in it are ignored.
"""

import json
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as Backend
from torch import Tensor

from nanovllm.config import token_ids
from nanovllm.errors import CheckpointError
from nanovllm.tokenizer import TokenizerParts

FORMATS = {".gguf": "nanovllm.gguf:GGUFCheckpoint"}
"""File suffix -> class of a checkpoint that is one file."""

RESOLVER = "nanovllm.hub:resolve"
"""What turns a name that is no path into a path."""


class Checkpoint(Protocol):
    """What the engine asks of a model on disk."""

    config: dict[str, Any]
    """The content of ``config.json``, in Hugging Face's names, whatever the file format."""
    generation_config: dict[str, Any]
    """The content of ``generation_config.json``: end ids and default sampling parameters. May be empty."""

    def tokenizer_parts(self) -> TokenizerParts:
        """Build the tokenizer. Raises CheckpointError where the files do not hold one that we can read."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter once, under its Hugging Face name, on the CPU, in the type it has on disk
        (quantised types are expanded to float32)."""


def open_checkpoint(
    model: str, *, revision: str | None = None, download_dir: str | None = None, token: str | None = None
) -> Checkpoint:
    """Open a folder, a file of a known format, or what a name stands for. Raises CheckpointError."""
    path = Path(model).expanduser()
    if not model or not path.exists():  # an empty one would be the current folder
        path = find(RESOLVER)(model, revision=revision, download_dir=download_dir, token=token)
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.suffix.lower() not in FORMATS:
        raise CheckpointError(
            f"{path} is a file of an unknown format; give a model folder or a file ending in {', '.join(FORMATS)}."
        )
    checkpoint: Checkpoint = find(FORMATS[path.suffix.lower()])(path)
    return checkpoint


def find(entry: str) -> Any:
    """Import what a table calls ``module:name``: how the core reaches a room it does not know."""
    module, name = entry.split(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as missing:
        raise CheckpointError(f"this needs {module}, which cannot be imported here: {missing}.") from missing


class FolderCheckpoint:
    """A folder with ``config.json``, the weights (safetensors or PyTorch files), and the tokenizer's files.

    Links that leave it are refused, but for those of a hub's cache (``snapshots/<revision>/file`` to ``blobs``).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json, so it is not a model folder. Give the folder that holds it."
            )
        homes = [folder.resolve()]
        if folder.absolute().parent.name == "snapshots":
            homes.append((folder.absolute().parents[1] / "blobs").resolve())
        for path in folder.iterdir():
            if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in homes):
                raise CheckpointError(
                    f"{path} is a link to {path.resolve()}, outside the model's folder. Copy the file to its place."
                )
        self.config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, shard by shard."""
        for path in self._weight_files():
            yield from watched(path, _safetensors(path) if path.suffix == ".safetensors" else _pytorch(path))

    def tokenizer_parts(self) -> TokenizerParts:
        """Read ``tokenizer.json`` and its companions."""
        folder = self._folder
        if not (folder / "tokenizer.json").is_file():
            if (folder / "tokenizer.model").is_file():
                way_out = (
                    "only a SentencePiece tokenizer.model, which is not read here. Convert it once with "
                    "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
                )
            else:
                way_out = (
                    "no tokenizer.json. Copy it from the model's source, name another model with tokenizer=..., "
                    "or pass skip_tokenizer_init=True and work with token ids"
                )
            raise CheckpointError(f"{folder} has {way_out}.")
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {error}.") from error
        backend.no_padding()
        backend.no_truncation()
        settings = self._optional_json("tokenizer_config.json")
        special = {
            name: _text(value)
            for name, value in (self._optional_json("special_tokens_map.json") | settings).items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return TokenizerParts(
            backend=backend,
            eos_token_ids=token_ids(eos),
            chat_template=self._chat_template(settings.get("chat_template")),
            special_tokens=special,
        )

    def _chat_template(self, listed: object) -> str | None:
        """``chat_template.jinja`` wins; else tokenizer_config.json's text, or its list's entry "default"."""
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        if isinstance(listed, list):
            named = {entry.get("name"): entry.get("template") for entry in listed if isinstance(entry, dict)}
            listed = named.get("default")
        return listed if isinstance(listed, str) else None

    def _optional_json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return read_json(path) if path.is_file() else {}

    def _weight_files(self) -> list[Path]:
        for single, index in (
            ("model.safetensors", "model.safetensors.index.json"),
            ("pytorch_model.bin", "pytorch_model.bin.index.json"),
        ):
            if (self._folder / index).is_file():
                return self._shards(self._folder / index)
            if (self._folder / single).is_file():
                return [self._folder / single]
        raise CheckpointError(
            f"{self._folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index of either. "
            'Fetch them, or pass load_format="dummy" for random ones.'
        )

    def _shards(self, index: Path) -> list[Path]:
        """Return the files that an index names; each must be a plain name of a file that lies in the folder."""
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map, the table from tensor names to files.")
        names = list(weight_map.values())
        files = {path.name for path in self._folder.iterdir() if path.is_file()}
        for name in names:
            if not isinstance(name, str) or name not in files or not name.endswith((".safetensors", ".bin")):
                raise CheckpointError(
                    f"{index} names the shard {name!r}; it must be the plain name of a file in the same folder."
                )
        return [self._folder / name for name in dict.fromkeys(names)]


def watched(path: Path, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass the tensors of a mapped file on. Raises CheckpointError, before each is read, if the file has another size
    by now: to read what was cut off would end the process (SIGBUS)."""
    size = path.stat().st_size

    def check() -> None:
        if not path.exists() or path.stat().st_size != size:
            raise CheckpointError(f"{path} changed while it was read. Load the model again when nobody writes to it.")

    for each in tensors:
        check()  # whoever gets it may be the first to read it
        yield each
        check()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if the file holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must hold a JSON object.")
    return content


def _text(value: str | dict[str, Any]) -> str:
    """A special token is a string, or an object with its ``content``."""
    return value if isinstance(value, str) else str(value.get("content", ""))


def _safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}. Fetch it again.") from error


def _pytorch(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Read a pickled state dict with weights_only: tensors and nothing else."""
    try:
        # files from before torch 1.6 are no zip archives and cannot be mapped
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as plain weights: {error}.") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise CheckpointError(f"{path} must hold a dict from names to tensors.")
    yield from tensors.items()

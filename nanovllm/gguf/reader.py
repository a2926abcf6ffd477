"""Read the header of a GGUF file (versions 2 and 3): metadata and the table of tensors.

    magic "GGUF" | version u32 | tensors u64 | pairs u64
    pairs   x    ( key: string | type u32 | value )
    tensors x    ( name: string | dims u32 | dim u64 x dims, innermost first | type u32 | offset u64 )
    padding to ``general.alignment`` (32 unless the metadata says otherwise)
    data         each tensor at its offset from here

A string is a length (u64) and that many bytes of UTF-8; an array is an item type (u32), a count (u64) and
the items. All numbers are little-endian. A file is a stranger's input: every count and length is compared
with the bytes that are left before anything is read or allocated. Source: the GGUF specification in ggml's
``docs`` folder.
"""

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ITEMS = 1 << 22
"""Most items of one array: sixteen times the largest vocabulary, and a bound for memory when a file lies."""

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type -> letter of the ``struct`` module."""

SMALLEST_PAIR = 8 + 4 + 1
SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8

Scalar = int | float | bool | str
Value = Scalar | Sequence[Scalar]


@dataclass(frozen=True, slots=True)
class QuantType:
    """How a tensor type stores its values: in blocks of ``block_values`` that take ``block_bytes``."""

    name: str
    block_values: int
    block_bytes: int


TYPES = {
    0: QuantType("F32", 1, 4),
    1: QuantType("F16", 1, 2),
    2: QuantType("Q4_0", 32, 18),
    3: QuantType("Q4_1", 32, 20),
    6: QuantType("Q5_0", 32, 22),
    7: QuantType("Q5_1", 32, 24),
    8: QuantType("Q8_0", 32, 34),
    10: QuantType("Q2_K", 256, 84),
    11: QuantType("Q3_K", 256, 110),
    12: QuantType("Q4_K", 256, 144),
    13: QuantType("Q5_K", 256, 176),
    14: QuantType("Q6_K", 256, 210),
    16: QuantType("IQ2_XXS", 256, 66),
    17: QuantType("IQ2_XS", 256, 74),
    18: QuantType("IQ3_XXS", 256, 98),
    19: QuantType("IQ1_S", 256, 50),
    20: QuantType("IQ4_NL", 32, 18),
    21: QuantType("IQ3_S", 256, 110),
    22: QuantType("IQ2_S", 256, 82),
    23: QuantType("IQ4_XS", 256, 136),
    24: QuantType("I8", 1, 1),
    25: QuantType("I16", 1, 2),
    26: QuantType("I32", 1, 4),
    27: QuantType("I64", 1, 8),
    28: QuantType("F64", 1, 8),
    29: QuantType("IQ1_M", 256, 56),
    30: QuantType("BF16", 1, 2),
    34: QuantType("TQ1_0", 256, 54),
    35: QuantType("TQ2_0", 256, 66),
    39: QuantType("MXFP4", 32, 17),
}
"""Tensor type number -> layout. More than we can expand, so that a refusal can name what it refuses."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it; the file has it the other way round."""
    kind: QuantType
    offset: int
    """First byte, counted from the start of the file."""

    @property
    def num_bytes(self) -> int:
        """Length in the file."""
        return math.prod(self.shape) // self.kind.block_values * self.kind.block_bytes


class GGUFFile:
    """A GGUF file, mapped into memory, its header read and checked. The data is touched only by ``data``."""

    def __init__(self, path: Path) -> None:
        """Open ``path``. Raises CheckpointError where it is not a GGUF file whose parts lie inside it."""
        # A private mapping that may be written costs nothing until somebody writes, and torch takes no tensor
        # over read-only memory without a warning.
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path} cannot be read: {error}. Give the path of a GGUF file.") from error
        cursor = _Cursor(self._map, path)
        num_tensors, num_pairs = _read_start(cursor)
        self.path = path
        self.metadata = _read_metadata(cursor, num_pairs)
        self.tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, self.metadata))

    def data(self, tensor: TensorInfo) -> Tensor:
        """Return the bytes of ``tensor`` as uint8, one-dimensional, without copying them."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.offset)


class _Cursor:
    """A place in the file that only moves forward and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.place = 0

    def error(self, found: str) -> CheckpointError:
        """Build the error for a damaged header: ``found`` says what was read and which rule it breaks."""
        return CheckpointError(
            f"{self.path}: {found} (near byte {self.place} of {self.size}). "
            "The file is damaged or was not downloaded completely; fetch it again."
        )

    def scalar(self, letter: str) -> int | float | bool:
        """Read one number or truth value."""
        value: int | float | bool = self.scalars(letter, 1)[0]
        return value

    def count(self, letter: str) -> int:
        """Read one unsigned integer."""
        return int(self.scalar(letter))

    def scalars(self, letter: str, count: int) -> tuple[int | float | bool, ...]:
        """Read ``count`` numbers of one type."""
        layout = f"<{count}{letter}"
        self.need(count, struct.calcsize(f"<{letter}"), "numbers")
        values = struct.unpack_from(layout, self.data, self.place)
        self.place += struct.calcsize(layout)
        return values

    def need(self, count: int, smallest: int, what: str) -> None:
        """Raise unless ``count`` things of at least ``smallest`` bytes can still come."""
        if count * smallest > self.size - self.place:
            raise self.error(f"{count} {what} are announced, but {self.size - self.place} bytes are left")

    def string(self) -> str:
        """Read one string."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read ``count`` strings; the loop is the time it takes to open a file (a quarter million tokens)."""
        self.need(count, 8, "strings")
        data, place, size = self.data, self.place, self.size
        read_length = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                (length,) = read_length(data, place)
                start = place + 8
                place = start + length
                if place > size:
                    raise self.error(f"a string of {length} bytes is announced at byte {start - 8}")
                found.append(data[start:place].decode())
        except struct.error:
            raise self.error("the strings of an array run past the end of the file") from None
        except UnicodeDecodeError as error:
            raise self.error(f"a string is not UTF-8: {error}") from error
        self.place = place
        return found

    def value(self) -> Value:
        """Read a typed value of the metadata."""
        kind = self.count("I")
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise self.error(f"value type {kind} is unknown; types go from 0 to 12")
        return self.scalar(SCALARS[kind])

    def array(self) -> Sequence[Scalar]:
        """Read an array of numbers or strings. Arrays of arrays exist in no model, and are refused."""
        kind, count = self.count("I"), self.count("Q")
        if count > MAX_ITEMS:
            raise self.error(f"an array has {count} items; at most {MAX_ITEMS} are allowed")
        if kind == STRING:
            return self.strings(count)
        if kind not in SCALARS:
            raise self.error(f"an array has items of type {kind}; numbers and strings are allowed")
        return self.scalars(SCALARS[kind], count)


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the number of tensors and of metadata pairs."""
    magic = cursor.data[: len(MAGIC)]
    if magic != MAGIC:
        raise cursor.error(f"the file begins with {magic!r}; a GGUF file begins with {MAGIC!r}")
    cursor.place = len(MAGIC)
    version = cursor.count("I")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{cursor.path} is GGUF version {version}; versions 2 and 3, little-endian, can be read. "
            "Convert the model again with a current llama.cpp."
        )
    num_tensors, num_pairs = cursor.count("Q"), cursor.count("Q")
    cursor.need(num_tensors, SMALLEST_TENSOR, "tensors")
    cursor.need(num_pairs, SMALLEST_PAIR, "metadata pairs")
    return num_tensors, num_pairs


def _read_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value()
    return metadata


def _alignment(cursor: _Cursor, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    # 8 bytes, so that any number may be read where a tensor begins.
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 != 0:
        raise cursor.error(f"general.alignment is {alignment!r}; it must be a positive multiple of 8")
    return alignment


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    """Read the table of tensors; names are unique, ranges lie inside the file and do not overlap."""
    rows = [_read_tensor(cursor) for _ in range(num_tensors)]
    start = -(-cursor.place // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    end = start
    for name, shape, kind, offset in sorted(rows, key=lambda row: row[3]):
        tensor = TensorInfo(name, shape, kind, start + offset)
        if name in tensors:
            raise cursor.error(f"tensor {name!r} appears twice")
        if offset % alignment != 0:
            raise cursor.error(f"tensor {name!r} has offset {offset}, not a multiple of {alignment}")
        if tensor.offset < end or tensor.offset + tensor.num_bytes > cursor.size:
            raise cursor.error(
                f"tensor {name!r} of {tensor.num_bytes} bytes lies at byte {tensor.offset}; "
                f"it must begin at or after byte {end} and end inside the file"
            )
        end = tensor.offset + tensor.num_bytes
        tensors[name] = tensor
    return tensors


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], QuantType, int]:
    """Read one row: name, shape (outermost first), type, offset from the start of the data."""
    name, num_dims = cursor.string(), cursor.count("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = [cursor.count("Q") for _ in range(num_dims)]
    number, offset = cursor.count("I"), cursor.count("Q")
    if number not in TYPES:
        known = ", ".join(f"{key} ({kind.name})" for key, kind in TYPES.items())
        raise cursor.error(f"tensor {name!r} has type number {number}; known: {known}")
    kind = TYPES[number]
    if min(dims) < 1 or dims[0] % kind.block_values != 0:
        raise cursor.error(
            f"tensor {name!r} has dimensions {dims}; they must be positive, "
            f"and the first a multiple of {kind.block_values} for type {kind.name}"
        )
    return name, tuple(reversed(dims)), kind, offset

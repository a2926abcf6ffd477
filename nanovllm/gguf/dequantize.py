"""Expand GGUF's quantised tensors to float32, vectorised over blocks.

A quantised tensor is a row of equal blocks; each holds small integers and the scales that give them meaning.
d and m are float16; a nibble is 4 bits; "16n" is sixteen bytes of two nibbles each.

    Q4_0   32 values   | d | 16n |                      value = d * (q - 8)
    Q4_1   32 values   | d | m | 16n |                  value = d * q + m
    Q5_0   32 values   | d | 4 bytes of 5th bits | 16n |        d * (q - 16)
    Q5_1   32 values   | d | m | 4 bytes of 5th bits | 16n |    d * q + m
    Q8_0   32 values   | d | 32 int8 |                  value = d * q
    Q4_K  256 values   | d | m | 12 scales | 128n |     8 parts of 32: value = d * scale * q - m * min
    Q5_K  256 values   | d | m | 12 scales | 32 bytes of 5th bits | 128n |          the same
    Q6_K  256 values   | 128n | 64 bytes of 5th and 6th bits | 16 int8 scales | d |
                                                        16 parts of 16: value = d * scale * (q - 32)

In a 32-value block byte i holds value i in its low nibble and value i + 16 in its high one. The figures at
the functions show the others. All arithmetic is float32, in the order in which ggml does it, so the values
are equal to ggml's. Source: ``ggml-common.h`` (layout) and ``dequantize_row_*`` in ``ggml-quants.c``.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.errors import CheckpointError
from nanovllm.gguf.reader import GGUFFile, TensorInfo

CHUNK_VALUES = 127 * 256
"""Values expanded at a time. Just below 32,768, from where torch spreads an operation over its threads:
these operations are so short that on a busy machine the threads would mostly wait for each other (measured
for 268 million values on 2 cores: 20 s instead of 1.2 s beside two other processes, and on idle cores 0.4 s
instead of 0.8 s). The temporaries of one chunk also stay in the cache."""

Expand = Callable[[Tensor, Tensor], None]
"""Expands blocks (uint8 [blocks, bytes]) into a float32 tensor [blocks, values]."""


def dequantize(file: GGUFFile, tensor: TensorInfo) -> Tensor:
    """Return ``tensor`` in its shape: float32, or float16 and bfloat16 where the file has them (then a view).

    Raises CheckpointError for a type that is not in ``PLAIN`` or ``EXPAND``.
    """
    check_type(tensor, str(file.path))
    data = file.data(tensor)
    if tensor.kind.name in PLAIN:
        return data.view(PLAIN[tensor.kind.name]).view(tensor.shape)
    expand = EXPAND[tensor.kind.name]
    blocks = data.view(-1, tensor.kind.block_bytes)
    values = torch.empty(math.prod(tensor.shape), dtype=torch.float32).view(-1, tensor.kind.block_values)
    step = CHUNK_VALUES // tensor.kind.block_values
    for start in range(0, len(blocks), step):
        expand(blocks[start : start + step], values[start : start + step])
    return values.view(tensor.shape)


def check_type(tensor: TensorInfo, path: str) -> None:
    """Raise CheckpointError where the type of ``tensor`` cannot be expanded."""
    if tensor.kind.name not in PLAIN and tensor.kind.name not in EXPAND:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} has type {tensor.kind.name}; "
            f"supported types are {', '.join([*PLAIN, *EXPAND])}. "
            "Take the model in one of these, for example Q4_K_M or Q8_0."
        )


def _half(blocks: Tensor, start: int) -> Tensor:
    """Read the float16 at byte ``start`` of each block: float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack 16 bytes into 32 values: low nibbles, then high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Spread 4 bytes of bits, lowest first, into 32 values that are 0 or 16."""
    places = torch.arange(8, dtype=torch.uint8)
    bits = packed.unsqueeze(-1) >> places & 1  # [blocks, 4, 8]
    return (bits << 4).flatten(1)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    torch.mul(_nibbles(blocks[:, 2:]).view(torch.int8) - 8, _half(blocks, 0), out=out)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    torch.mul(_nibbles(blocks[:, 4:]), _half(blocks, 0), out=out).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    levels = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    torch.mul(levels.view(torch.int8) - 16, _half(blocks, 0), out=out)


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    levels = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    torch.mul(levels, _half(blocks, 0), out=out).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


def _part_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes into 8 scales and 8 minima of 6 bits each: uint8 [blocks, 8] twice.

        byte 0..3     | s4..7 high 2 bits | scale 0..3 |      bits 7 6 | 5 4 3 2 1 0
        byte 4..7     | m4..7 high 2 bits | min   0..3 |
        byte 8..11    | m4..7 low 4 bits  | s4..7 low 4 bits |         7 6 5 4 | 3 2 1 0

    Source: ``get_scale_min_k4`` in ``ggml-quants.c``.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return scales, minima


def _pairs_of_parts(packed: Tensor) -> Tensor:
    """Unpack 128 bytes into 8 parts of 32 values: uint8 [blocks, 8, 32].

    bytes      0..31      32..63     64..95     96..127
    low        part 0     part 2     part 4     part 6
    high       part 1     part 3     part 5     part 7
    """
    rows = packed.view(-1, 4, 1, 32)
    return torch.cat((rows & 15, rows >> 4), dim=2).flatten(1, 2)


def _scaled_parts(levels: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Finish Q4_K and Q5_K: out = d * scale * level - m * min, part by part."""
    scales, minima = _part_scales(blocks[:, 4:16])
    scale = (scales * _half(blocks, 0)).unsqueeze(-1)  # [blocks, 8, 1]
    least = (minima * _half(blocks, 2)).unsqueeze(-1)
    torch.mul(levels, scale, out=out.view(-1, 8, 32)).sub_(least)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _scaled_parts(_pairs_of_parts(blocks[:, 16:]), blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """Byte i of the fifth bits serves value i of all eight parts: bit p belongs to part p."""
    parts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)  # [8, 1]
    fifth = (blocks[:, 16:48].unsqueeze(1) >> parts & 1) << 4  # [blocks, 8, 32]
    _scaled_parts(_pairs_of_parts(blocks[:, 48:]) | fifth, blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """Two halves of 128 values; in each, four runs of 32 values share the bytes like this:

    64 bytes of nibbles     0..31       32..63         32 bytes of two-bit pairs, i = 0..31
    low                     run 0       run 1          bits 1 0   run 0 value i
    high                    run 2       run 3          bits 3 2   run 1
                                                       bits 5 4   run 2
                                                       bits 7 6   run 3
    """
    nibbles = blocks[:, :128].view(-1, 2, 1, 64)
    low = torch.cat((nibbles & 15, nibbles >> 4), dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts & 3) << 4  # [blocks, 2, 4, 32]
    levels = (low | high).view(torch.int8) - 32
    scale = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)  # [blocks, 16]
    torch.mul(levels.view(-1, 16, 16), scale.unsqueeze(-1), out=out.view(-1, 16, 16))


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that torch has itself."""

EXPAND: dict[str, Expand] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Types that are expanded here."""

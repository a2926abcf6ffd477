"""A product of matrices in which no row changes another, whatever their number and their places.

    out[row, line] = bias[line] + sum over k of x[row, k] weight[line, k]     k = 0, 1, 2, ... in this order, in float32

A program multiplies a tile of rows by a tile of lines and walks the whole of k alone: nothing is split along k, nothing
is added atomically. What it adds up at a time is fixed by the instruction, 16 numbers on the matrix units and one
without them, and each of a tile's sums goes through the same instructions in the same order. So a sum does not depend
on where in a tile its row and its line lie, on what lies beside them, or on how many rows there are.

Nor does it depend on the tile's size, as long as the instruction adds up as many numbers at a time: a wider one has
more sums, not other ones. That is a property of the hardware, which ``tests/gpu/test_deterministic.py`` checks: all
tiles, and all numbers of rows, must give the same bits. So a few rows can have tiles that read the weight fast, and
many rows tiles that multiply fast. Where a device should fail the test, ``TILES`` must be cut to one tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED


class Tile(NamedTuple):
    """How a product is cut."""

    rows: int
    outputs: int
    """Lines of the weight."""
    inputs: int
    """Columns at a time."""
    warps: int
    stages: int


TILES = (Tile(128, 128, 64, 8, 3), Tile(64, 64, 128, 4, 3), Tile(64, 32, 128, 4, 4), Tile(64, 16, 128, 4, 4))
"""For types of 16 bits, the largest first. 64 rows are the least that one instruction of Hopper takes; none needs more
than 96 KiB of shared memory, which every GPU since compute capability 8.0 has."""

WIDE_TILE = Tile(32, 64, 32, 4, 2)
"""For float32, which the matrix units would cut to 11 bits: one multiply-add after the other."""

ENOUGH = 128
"""Programs from which on a large GPU is busy: it has 132 processors, or about as many."""

TOGETHER = 8
"""Tiles of rows that meet the same tile of the weight one after the other, while it is in the L2 cache."""


@triton.jit(do_not_specialize=["rows"])  # it changes with each step: nothing should be compiled for it
def linear_kernel(
    x, weight, bias, out, rows, outputs, inputs, x_row,
    ROWS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
    BIAS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Multiply ``ROWS`` rows by ``LINES`` lines of the weight. ``WHOLE``: the inputs are a multiple of ``COLUMNS``.

    Rows beyond the last are zeros; lines beyond the last are read as the last, which needs no mask.
    """
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(outputs, LINES)
    band = tl.program_id(0) // (TOGETHER * across)
    place = tl.program_id(0) % (TOGETHER * across)
    height = tl.minimum(down - band * TOGETHER, TOGETHER)
    first_row, first_line = (band * TOGETHER + place % height) * ROWS, place // height * LINES

    row = first_row + tl.arange(0, ROWS)
    line = tl.minimum(first_line + tl.arange(0, LINES), outputs - 1)
    column = tl.arange(0, COLUMNS)
    exists = (row < rows)[:, None]
    # int64: rows and the weight pass 2**31 numbers
    x_at = x + row.to(tl.int64)[:, None] * x_row + column[None, :]  # [ROWS, COLUMNS]
    weight_at = weight + line.to(tl.int64)[:, None] * inputs + column[None, :]  # [LINES, COLUMNS]
    sums = tl.zeros([ROWS, LINES], tl.float32)
    for start in range(0, inputs, COLUMNS):
        if WHOLE:
            values = tl.load(x_at, exists, 0.0)
            tile = tl.load(weight_at)
        else:
            inside = (start + column < inputs)[None, :]
            values = tl.load(x_at, exists & inside, 0.0)
            tile = tl.load(weight_at, inside, 0.0)
        sums = tl.dot(values, tl.trans(tile), sums, input_precision="ieee")
        x_at += COLUMNS
        weight_at += COLUMNS

    line = first_line + tl.arange(0, LINES)
    if BIAS:
        sums += tl.load(bias + line, line < outputs, 0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * outputs + line[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), exists & (line < outputs)[None, :])


def choose(rows: int, outputs: int, dtype: torch.dtype) -> Tile:
    """Return the largest tile that leaves enough programs, and not most of its rows empty; else the smallest."""
    if dtype is torch.float32:
        return WIDE_TILE
    for tile in TILES:
        if tile.rows <= max(rows, TILES[-1].rows) and _programs(rows, outputs, tile) >= ENOUGH:
            return tile
    return TILES[-1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """See ``reference.linear``; one row gives the same bits whatever the others are. float32 inside, rounded once.

    The channels of a row lie side by side, rows may lie apart; the weight is contiguous.
    """
    assert x.stride(1) == 1 and weight.is_contiguous() and x.dtype is weight.dtype, "the front door sees to it"
    rows, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty_like(x[:, :1].expand(-1, outputs), memory_format=torch.contiguous_format)
    if not rows:
        return out
    tile = choose(rows, outputs, x.dtype) if tile is None else tile
    linear_kernel[(_programs(rows, outputs, tile),)](
        x, weight, x if bias is None else bias, out, rows, outputs, inputs, x.stride(0),
        ROWS=tile.rows, LINES=tile.outputs, COLUMNS=tile.inputs, TOGETHER=TOGETHER,
        BIAS=bias is not None, WHOLE=inputs % tile.inputs == 0,
        num_warps=tile.warps, num_stages=tile.stages, **FUSED,
    )  # fmt: skip
    return out


def _programs(rows: int, outputs: int, tile: Tile) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)

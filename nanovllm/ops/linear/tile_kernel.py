"""Linear layers for some tens of rows, on the matrix units.

A step of that many requests is still the reading of its weights, but a program also reads all rows it multiplies, and
these come out of the L2 cache no faster than the weights come out of memory. So a program takes many lines of the
weight, or few columns, which leaves the fewest rows to read; where that gives too few programs, a product is cut along
its inputs into parts, and whoever reads it adds them:

    weight [outputs, inputs]     outputs / LINES programs, times PARTS, times rows / ROWS
    out    [PARTS, rows, outputs]

While the kernel before is still running, a program asks for its weights to be brought to L2 (``overlap``). Sums are
float32, their order depends on the tile alone, and nothing is added atomically.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED
from nanovllm.ops.linear.kernel import _fetch, _gated, _load
from nanovllm.ops.overlap import launch_options, release, wait


class Tile(NamedTuple):
    """How a product is cut."""

    lines: int
    """Of the weight; of a gated one, lines of the gate and as many of ``up``."""
    columns: int
    """At a time."""
    parts: int
    warps: int
    stages: int


ROWS = 64
"""Most rows of a program."""

ENOUGH = 128
"""Programs that keep a large GPU busy: it has 132 processors, or about as many."""

LEAST_SPAN = 256
"""Columns that a part should have."""


@triton.jit(do_not_specialize=["rows"])  # it changes with each step: nothing should be compiled for it
def tile_kernel(
    x, weight, bias, out, rows, outputs, x_row,
    INPUTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Multiply ``ROWS`` rows by ``LINES`` lines of the weight, along ``SPAN`` columns of it.

    Lines beyond the last are read as the last. Rows beyond the last are not read: if all programs read one row so many
    times, the part of the L2 cache that has it would hold them up. ``WHOLE``: no column lies beyond the end. A gate and
    ``up`` are one tile of twice as many lines, which the matrix units take together.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    BOTH: tl.constexpr = 2 * LINES if GATED else LINES
    first = tl.program_id(0) * LINES
    begin = tl.program_id(1) * SPAN
    beyond = tl.full((), INPUTS, tl.int64) * outputs  # where the lines of ``up`` begin
    if WAITS:
        _fetch(weight, first, outputs, begin, INPUTS, LINES, SPAN)
        if GATED:
            _fetch(weight + beyond, first, outputs, begin, INPUTS, LINES, SPAN)
    release(WAITS)
    wait(WAITS)

    index = tl.arange(0, BOTH)
    line = tl.minimum(first + index % LINES, outputs - 1).to(tl.int64) + index // LINES * outputs  # int64: beyond 2**31
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    column = begin + tl.arange(0, COLUMNS)[None, :]
    x_at = x + row.to(tl.int64) * x_row + column
    weight_at = weight + line[:, None] * INPUTS + column
    sums = tl.zeros([BOTH, ROWS], tl.float32)
    for start in range(0, SPAN, COLUMNS):
        inside = column + start < tl.minimum(begin + SPAN, INPUTS)
        there = row < rows if WHOLE else inside & (row < rows)
        values = tl.load(x_at + start, there, 0.0)
        sums = tl.dot(_load(weight_at + start, inside, WHOLE), tl.trans(values), sums)

    place = first + tl.arange(0, LINES)[None, :]
    exists = place < outputs
    if GATED:
        sums, up_sums = tl.split(tl.permute(tl.reshape(sums, (2, LINES, ROWS)), (1, 2, 0)))
    result = tl.trans(sums)  # [ROWS, LINES]
    if BIAS:  # once: in the first part
        result += tl.load(bias + place, place < tl.where(begin == 0, outputs, 0), 0.0).to(tl.float32)
    if GATED:
        up = tl.trans(up_sums)
        if BIAS:
            up += tl.load(bias + outputs + place, exists, 0.0).to(tl.float32)
        result = _gated(result, up, ACTIVATION, x.dtype.element_ty)
    at = (tl.program_id(1) * rows + row) * outputs + place
    tl.store(out + at, result.to(out.dtype.element_ty), exists & (row < rows))


def choose(rows: int, outputs: int, gated: bool, parts: int) -> Tile:
    """Return the tile for a product; ``outputs`` of a gated one are those behind the gate. ``parts``: how many at most.

    64 lines leave the fewest rows to read, and are the least that Hopper's matrix units take at once; parts make up
    for programs. Figures of an H200 in docs/numbers.md.
    """
    if gated:
        return Tile(lines=32, columns=64, parts=1, warps=4, stages=8)
    programs = triton.cdiv(outputs, 64) * triton.cdiv(rows, ROWS)
    parts = max(1, min(parts, ENOUGH // max(1, programs)))
    return Tile(lines=64, columns=64, parts=parts, warps=4, stages=8 if parts == 1 else 6)


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None, *, in_parts: bool = False,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Return ``reference.linear``, or with an activation ``reference.gated``; ``in_parts``: see ``reference.plus``.

    Rows may lie apart; the weight is contiguous. float32, which the matrix units would cut to 11 bits, is not taken.
    """
    assert x.stride(1) == 1 and weight.is_contiguous() and x.element_size() == 2, "the front door sees to it"
    rows, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    tile = tile or choose(rows, outputs, activation is not None, inputs // LEAST_SPAN if in_parts else 1)
    assert tile.parts == 1 or (in_parts and activation is None), "a gate needs whole sums"
    dtype = x.dtype if tile.parts == 1 else torch.float32
    out = torch.empty(tile.parts, rows, outputs, dtype=dtype, device=x.device)
    if rows and outputs:
        padded = min(ROWS, max(8, triton.next_power_of_2(rows)))
        span = triton.cdiv(triton.cdiv(inputs, tile.columns), tile.parts) * tile.columns
        lines = tile.lines if activation is None else 2 * tile.lines
        options = launch_options(x)
        options["WAITS"] = min(options["WAITS"], 1)  # the next kernel's programs would take the room of this one's
        tile_kernel[triton.cdiv(outputs, tile.lines), tile.parts, triton.cdiv(rows, padded)](
            x, weight, x if bias is None else bias, out, rows, outputs, x.stride(0), INPUTS=inputs, SPAN=span,
            ROWS=padded, LINES=tile.lines, COLUMNS=tile.columns, WHOLE=span * tile.parts == inputs,
            BIAS=bias is not None, ACTIVATION=activation,
            num_warps=tile.warps, num_stages=_stages(tile.stages, (lines + padded) * tile.columns * 2, x.device),
            **options, **FUSED,
        )  # fmt: skip
    return out if tile.parts > 1 else out[0]


def _stages(most: int, num_bytes: int, device: torch.device) -> int:
    """Return how many tiles of so many bytes a program may have under way at once: what its shared memory holds."""
    if device.type == "cpu":
        return 1
    shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 1 << 16)
    return max(2, min(most, shared // num_bytes))

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


@triton.jit(do_not_specialize=["rows"])  # it changes with each step: nothing should be compiled for it
def tile_kernel(
    x, weight, bias, out, rows, outputs, x_row,
    INPUTS: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Multiply ``ROWS`` rows by ``LINES`` lines of the weight, along ``SPAN`` columns of it.

    Rows and lines beyond the last are read as the last, which needs no masks. ``WHOLE``: no column lies beyond the end.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    first = tl.program_id(0) * LINES
    begin = tl.program_id(1) * SPAN
    beyond = tl.full((), INPUTS, tl.int64) * outputs  # where the lines of ``up`` begin
    if WAITS:
        _fetch(weight, first, outputs, begin, INPUTS, LINES, SPAN)
        if GATED:
            _fetch(weight + beyond, first, outputs, begin, INPUTS, LINES, SPAN)
    release(WAITS)
    wait(WAITS)

    line = tl.minimum(first + tl.arange(0, LINES), outputs - 1).to(tl.int64)[:, None]  # int64: beyond 2**31
    row = tl.minimum(tl.program_id(2) * ROWS + tl.arange(0, ROWS), rows - 1).to(tl.int64)[:, None]
    column = begin + tl.arange(0, COLUMNS)[None, :]
    x_at = x + row * x_row + column
    weight_at = weight + line * INPUTS + column
    sums = tl.zeros([LINES, ROWS], tl.float32)
    up_sums = sums
    for start in range(0, SPAN, COLUMNS):
        inside = column + start < tl.minimum(begin + SPAN, INPUTS)
        values = tl.trans(_load(x_at + start, inside, WHOLE))
        sums = tl.dot(_load(weight_at + start, inside, WHOLE), values, sums)
        if GATED:
            up = _load(weight_at + beyond + start, inside, WHOLE)
            up_sums = tl.dot(up, values, up_sums)

    result = tl.trans(sums)  # [ROWS, LINES]
    place = first + tl.arange(0, LINES)[None, :]
    exists = place < outputs
    if BIAS:  # once: in the first part
        result += tl.load(bias + place, place < tl.where(begin == 0, outputs, 0), 0.0).to(tl.float32)
    if GATED:
        up = tl.trans(up_sums)
        if BIAS:
            up += tl.load(bias + outputs + place, exists, 0.0).to(tl.float32)
        result = _gated(result, up, ACTIVATION, x.dtype.element_ty)
    out_row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    at = (tl.program_id(1) * rows + out_row) * outputs + place
    tl.store(out + at, result.to(out.dtype.element_ty), exists & (out_row < rows))


def choose(rows: int, outputs: int, inputs: int, gated: bool, in_parts: bool) -> Tile:
    """Return the tile for a product; ``outputs`` of a gated one are those behind the gate. ``in_parts``: may have some.

    Figures of ``bench/linear.py`` on an H200: 64 lines leave the fewest rows to read, and parts make up for programs.
    """
    if gated:
        return Tile(lines=32, columns=128, parts=1, warps=4, stages=4)
    parts = max(1, min(ENOUGH // triton.cdiv(outputs, 64), inputs // 256)) if in_parts else 1
    if parts == 1 and rows > 32:
        return Tile(lines=64, columns=64, parts=1, warps=4, stages=6)
    return Tile(lines=64, columns=128, parts=parts, warps=4, stages=4)


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
    tile = tile or choose(rows, outputs, inputs, activation is not None, in_parts)
    assert tile.parts == 1 or (in_parts and activation is None), "a gate needs whole sums"
    dtype = x.dtype if tile.parts == 1 else torch.float32
    out = torch.empty(tile.parts, rows, outputs, dtype=dtype, device=x.device)
    if rows and outputs:
        padded = min(ROWS, max(8, triton.next_power_of_2(rows)))
        span = triton.cdiv(triton.cdiv(inputs, tile.columns), tile.parts) * tile.columns
        options = launch_options(x)
        options["WAITS"] = min(options["WAITS"], 1)  # the next kernel's programs would take the room of this one's
        tile_kernel[triton.cdiv(outputs, tile.lines), tile.parts, triton.cdiv(rows, padded)](
            x, weight, x if bias is None else bias, out, rows, outputs, x.stride(0), INPUTS=inputs, SPAN=span,
            ROWS=padded, LINES=tile.lines, COLUMNS=tile.columns, WHOLE=span * tile.parts == inputs,
            BIAS=bias is not None, ACTIVATION=activation,
            num_warps=tile.warps, num_stages=tile.stages, **options, **FUSED,
        )  # fmt: skip
    return out if tile.parts > 1 else out[0]

"""Linear layers for a few rows, alone or between a norm and a gated activation.

With few rows a layer is the reading of its weight, once. What a library loses there is the time in which nothing is
read: while a kernel starts, and while it waits for the one before. So the kernels are cut into enough programs for
every multiprocessor, each of which asks for all of its weights at once and keeps them in registers; the norm in front,
the gate behind and the addition of a residual are computed on the way; and where the GPU can start a kernel before the
last one has ended (``overlap``), a program asks for its weights first and waits for its rows afterwards:

    kernel before   [ weights | wait | product ]
    this one                     [ weights  | wait | product ]

A norm needs no pass of its own. Its scale is one number for each row, so it may come after the product, and each
program reads whole rows anyway and can add up their squares:

    sum_i w_i (g_i (s x_i)) = s (sum_i w_i (g_i x_i))    s = 1 / sqrt(mean of x_i^2 + eps)

Two kernels: ``few_kernel`` multiplies and adds, ``many_kernel`` uses the matrix units, which take g_i x_i in the rows'
type: so that must not overflow, and of 16-bit types bfloat16 alone has the room. Sums are float32 and their order
depends on the tile alone; nothing is added atomically.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED
from nanovllm.ops.overlap import fetch, launch_options, release, wait

FEW = 4
"""Most rows that can be multiplied without the matrix units; beyond, their sums leave no registers to weights."""

FEW_ROWS = 1
"""Up to how many rows that is also faster: beyond, a multiply-add for each takes as long as the reading."""

MAX_ROWS = 64
"""Most rows of 16-bit numbers; float32, which the matrix units would cut to 11 bits, stops at ``FEW``."""

WIDEST = 8192
"""Most inputs behind a norm, which each program computes for itself."""


class Tile(NamedTuple):
    """How a product is cut."""

    outputs: int
    """Lines of the weight that a program multiplies; of a gated one, lines of the gate and as many of ``up``."""
    inputs: int
    """Columns at a time."""
    warps: int
    held: int = 0
    """Tiles of the weight that are under way at a time on the matrix units; 0: without these, all of them."""


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    """Load a tile: 0 where it is not inside; ``WHOLE``: all of it is."""
    if WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, inside, 0.0)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """``activation.reference.gate_times_up`` of two float32 sums, rounded where it finds rounded numbers or rounds."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))  # 1 / sqrt(2)
    else:  # "gelu_pytorch_tanh", with (1 + tanh(t)) / 2 = 1 / (1 + exp(-2 t)) and 2 sqrt(2 / pi) = 1.5957...
        active = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return active.to(DTYPE).to(tl.float32) * up


@triton.jit
def _fetch(weight, first, outputs, start, INPUTS: tl.constexpr, LINES: tl.constexpr, SPAN: tl.constexpr):
    """Ask for the ``SPAN`` columns from ``start`` of ``LINES`` lines to be brought to the L2 cache, and go on."""
    STEP: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # a cache line of 128 bytes
    STEPS: tl.constexpr = triton.next_power_of_2((SPAN + STEP - 1) // STEP)
    line = tl.minimum(first + tl.arange(0, LINES), outputs - 1).to(tl.int64)[:, None]
    column = tl.minimum(start + tl.arange(0, STEPS) * STEP, INPUTS - 1)[None, :]
    fetch((weight + line * INPUTS + column).to(tl.int64))


@triton.jit(do_not_specialize=["rows"])  # it changes with each step: nothing should be compiled for it
def few_kernel(
    x, residual, gain, weight, bias, out, rows, outputs, x_row, residual_row, eps,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Multiply all rows by ``LINES`` lines of the weight, in tiles [ROWS, LINES, COLUMNS] of multiply-adds.

    The loop over tiles is written out, so that all of their loads can be under way at once. Rows and lines beyond
    the last are read as the last, which needs no masks.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    GATED: tl.constexpr = ACTIVATION is not None
    WHOLE: tl.constexpr = INPUTS % COLUMNS == 0
    TILES: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) * LINES
    line = tl.minimum(first + tl.arange(0, LINES), outputs - 1).to(tl.int64)[None, :, None]  # int64: beyond 2**31
    column = tl.arange(0, COLUMNS)[None, None, :]
    weights = weight + line * INPUTS + column  # [1, LINES, COLUMNS]
    inside = column < INPUTS
    tile = _load(weights, inside, WHOLE)
    up_weights = weights
    up_tile = tile
    beyond = tl.full((), INPUTS, tl.int64) * outputs  # where the lines of ``up`` begin
    if GATED:
        up_weights += beyond
        up_tile = _load(up_weights, inside, WHOLE)
    gains = inside
    if NORM:
        gains = _load(gain + column, inside, WHOLE)
    if WAITS and TILES > 1:
        _fetch(weight, first, outputs, COLUMNS, INPUTS, LINES, INPUTS - COLUMNS)
        if GATED:
            _fetch(weight + beyond, first, outputs, COLUMNS, INPUTS, LINES, INPUTS - COLUMNS)
    release(WAITS)  # the weights of the next kernel come after these
    wait(WAITS)

    place = first + tl.arange(0, LINES)[None, :]
    out_row = tl.arange(0, ROWS)[:, None]
    exists = (place < outputs) & (out_row < rows)
    more = 0.0
    if ADD:
        more = tl.load(residual + out_row.to(tl.int64) * residual_row + place, exists, 0.0).to(tl.float32)
    row = tl.arange(0, ROWS)[:, None, None]
    x_at = x + tl.minimum(row, rows - 1).to(tl.int64) * x_row + column  # [ROWS, 1, COLUMNS]
    sums = tl.zeros([ROWS, LINES, COLUMNS], tl.float32)
    up_sums = sums
    squares = tl.zeros([ROWS, 1, COLUMNS], tl.float32)
    for index in tl.static_range(TILES):
        start = index * COLUMNS
        inside = start + column < INPUTS
        if index > 0:
            tile = _load(weights + start, inside, WHOLE)
            if GATED:
                up_tile = _load(up_weights + start, inside, WHOLE)
            if NORM:
                gains = _load(gain + start + column, inside, WHOLE)
        values = _load(x_at + start, inside, WHOLE).to(tl.float32)
        if NORM:
            squares += values * values
            values *= gains.to(tl.float32)
        sums += tile.to(tl.float32) * values
        if GATED:
            up_sums += up_tile.to(tl.float32) * values

    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 2) / INPUTS + eps)  # [ROWS, 1]
    result = tl.sum(sums, 2) * scale  # [ROWS, LINES]
    if BIAS:
        result += tl.load(bias + place, place < outputs, 0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 2) * scale
        if BIAS:
            up += tl.load(bias + outputs + place, place < outputs, 0.0).to(tl.float32)
        result = _gated(result, up, ACTIVATION, DTYPE)
    if ADD:
        result = result.to(DTYPE).to(tl.float32) + more
    tl.store(out + out_row * outputs + place, result.to(DTYPE), exists)


@triton.jit
def _places(LINES: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return (line, column) of a tile [LINES, PARTS * CHUNKS * 32] as it is loaded, [LINES * PARTS * CHUNKS, 32]."""
    at = tl.arange(0, LINES * PARTS * CHUNKS)[:, None]
    line = at // (8 * PARTS * CHUNKS) * 8 + at % 8
    part, chunk = at // 8 % PARTS, at // (8 * PARTS) % CHUNKS
    return line, (part * CHUNKS + chunk) * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def _operand(tile, LINES: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Turn what was loaded at ``_places`` into [PARTS, LINES, CHUNKS * 32], where each thread has it.

    A thread of the matrix units holds pairs of neighbouring columns, a pair from each 8; a load of 16 bytes brings it 8
    neighbours. A sum does not depend on how columns are called: with the same new names in both factors each thread
    multiplies what it has loaded, 4 threads 32 columns of a line and a warp 8 lines, and nothing changes hands.

        column of 32, as bits   t t b a p     memory: thread, pair of the thread, one of the pair
        its name                b a t t p     matrix unit: step of 16, half of a step, thread, one of the pair
    """
    bits = tl.reshape(tile, (LINES // 8, CHUNKS, PARTS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(bits, (2, 0, 3, 1, 5, 6, 4, 7)), (PARTS, LINES, CHUNKS * 32))


@triton.jit(do_not_specialize=["rows"])
def many_kernel(
    x, residual, gain, weight, bias, out, rows, outputs, x_row, residual_row, eps,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    HELD: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Multiply all rows, padded to ``ROWS``, by ``LINES`` lines of the weight on the matrix units.

    A tile has ``PARTS`` times ``CHUNKS`` times 32 columns, a part for each warp: the parts are summed side by side and
    added at the end. ``HELD`` tiles of the weight are under way at a time, from registers to matrix units. One of the
    factors has a multiple of 16 lines, the other of 8: the weight takes the former if it can.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    GATED: tl.constexpr = ACTIVATION is not None
    ALL: tl.constexpr = 2 * LINES if GATED else LINES
    COLUMNS: tl.constexpr = PARTS * CHUNKS * 32
    WHOLE: tl.constexpr = INPUTS % COLUMNS == 0
    TILES: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    AT_ONCE: tl.constexpr = HELD if HELD < TILES else TILES
    first = tl.program_id(0) * LINES
    weight_line, column = _places(ALL, PARTS, CHUNKS)
    line = tl.minimum(first + weight_line % LINES, outputs - 1).to(tl.int64)  # int64: beyond 2**31
    if GATED:
        line += weight_line // LINES * (tl.full((), 1, tl.int64) * outputs)  # the second half is of ``up``
    weights = weight + line * INPUTS + column
    tiles = ()
    for index in tl.static_range(AT_ONCE):
        start = index * COLUMNS
        tiles += (_load(weights + start, start + column < INPUTS, WHOLE),)
    row, x_column = _places(ROWS, PARTS, CHUNKS)
    gains = ()
    for index in tl.static_range(AT_ONCE if NORM else 0):
        at = index * COLUMNS + x_column
        gains += (_load(gain + at, at < INPUTS, WHOLE),)
    release(WAITS)  # the weights of the next kernel come after these
    wait(WAITS)

    place = first + tl.arange(0, LINES)[None, :]
    out_row = tl.arange(0, ROWS)[:, None]
    exists = (place < outputs) & (out_row < rows)
    more = 0.0
    if ADD:
        more = tl.load(residual + out_row.to(tl.int64) * residual_row + place, exists, 0.0).to(tl.float32)
    x_at = x + tl.minimum(row, rows - 1).to(tl.int64) * x_row + x_column
    squares = tl.zeros([ROWS * PARTS * CHUNKS, 4], tl.float32)
    factors = ()
    for index in tl.static_range(AT_ONCE):
        start = index * COLUMNS
        factors += (_load(x_at + start, start + x_column < INPUTS, WHOLE),)
    sums = tl.zeros([PARTS, ROWS, ALL] if ALL == 8 else [PARTS, ALL, ROWS], tl.float32)
    for index in tl.static_range(TILES):
        start = (index + HELD) * COLUMNS
        if index + HELD < TILES:
            tiles += (_load(weights + start, start + column < INPUTS, WHOLE),)
            factors += (_load(x_at + start, start + x_column < INPUTS, WHOLE),)
            if NORM:
                gains += (_load(gain + start + x_column, start + x_column < INPUTS, WHOLE),)
        tile = _operand(tiles[index], ALL, PARTS, CHUNKS)
        values = factors[index]
        if NORM:
            wide = values.to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, (ROWS * PARTS * CHUNKS, 4, 8)), 2)
            values = (wide * gains[index].to(tl.float32)).to(DTYPE)
        factor = _operand(values, ROWS, PARTS, CHUNKS)
        if ALL == 8:
            sums = tl.dot(factor, tl.permute(tile, (0, 2, 1)), sums)
        else:
            sums = tl.dot(tile, tl.permute(factor, (0, 2, 1)), sums)

    result = tl.sum(sums, 0)
    if ALL > 8:
        result = tl.trans(result)  # [ROWS, ALL]
    if NORM:  # the squares lie as ``_places`` says
        squares = tl.sum(tl.reshape(tl.sum(squares, 1), (ROWS // 8, CHUNKS * PARTS, 8)), 1)
        result *= tl.rsqrt(tl.reshape(squares, (ROWS,)) / INPUTS + eps)[:, None]
    if GATED:
        result, up = tl.split(tl.permute(tl.reshape(result, (ROWS, 2, LINES)), (0, 2, 1)))
        if BIAS:
            up += tl.load(bias + outputs + place, place < outputs, 0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + place, place < outputs, 0.0).to(tl.float32)
    if GATED:
        result = _gated(result, up, ACTIVATION, DTYPE)
    if ADD:
        result = result.to(DTYPE).to(tl.float32) + more
    tl.store(out + out_row * outputs + place, result.to(DTYPE), exists)


def most_rows(dtype: torch.dtype) -> int:
    """Return how many rows a call may have."""
    return FEW if dtype is torch.float32 else MAX_ROWS


def choose(rows: int, outputs: int, inputs: int, gated: bool) -> Tile:
    """Return the tile for a product; ``outputs`` of a gated one are those behind the gate.

    A program holds its weights in registers, 8 to 16 KiB without the matrix units and 32 with them: with 132
    multiprocessors, all of a layer of Qwen3-0.6B fits in them at once. Figures of ``bench/linear.py`` on an H200.
    """
    if rows <= FEW_ROWS:
        return few_tile(rows, outputs, inputs, gated)
    return many_tile(rows, outputs, inputs, gated)


def few_tile(rows: int, outputs: int, inputs: int, gated: bool) -> Tile:
    """Return the tile for ``few_kernel``."""
    if inputs <= 1024:  # one tile
        lines = 8 if outputs > 2048 and rows == 1 and not gated else 4 if outputs > 2048 and rows <= 2 else 2
        columns = triton.next_power_of_2(inputs)
        return Tile(outputs=lines, inputs=columns, warps=max(columns // 256, 1))
    if rows > 2:
        return Tile(outputs=2, inputs=1024, warps=4)
    columns = min(triton.next_power_of_2(inputs), 4096)
    return Tile(outputs=2, inputs=columns, warps=min(columns // 256, 8))


def many_tile(rows: int, outputs: int, inputs: int, gated: bool) -> Tile:
    """Return the tile for ``many_kernel``: 512 columns of 8 to 32 outputs at a time, as many as registers hold.

    Tiles of 1024 columns and 8 warps, with half as many programs, are a quarter slower at 8 and at 16 rows.
    """
    lines = 8 if gated else 16 if outputs < 32768 else 32
    columns = max(128, min(512, triton.next_power_of_2(inputs)))
    return Tile(outputs=lines, inputs=columns, warps=4, held=min(triton.cdiv(inputs, columns), 4 if lines == 16 else 2))


def norm_rows(dtype: torch.dtype) -> int:
    """Return how many rows a call with a norm may have; see the head of this file."""
    return MAX_ROWS if dtype is torch.bfloat16 else FEW


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """See ``reference.linear``. Takes up to ``most_rows`` rows, which may lie apart; the weight is contiguous."""
    return _launch(x, weight, bias, None, Around(), tile)


def plus(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile | None = None) -> Tensor:
    """Return ``reference.linear`` plus a residual. Takes what ``linear`` takes."""
    return _launch(x, weight, bias, None, Around(residual=residual), tile)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, tile: Tile | None = None) -> Tensor:
    """See ``reference.gated``. Takes what ``linear`` takes."""
    return _launch(x, weight, bias, activation, Around(), tile)


def norm_linear(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """Return ``reference.linear`` of the norm of ``x``. Takes up to ``norm_rows`` rows of up to ``WIDEST`` inputs."""
    return _launch(x, weight, bias, None, Around(gain=gain, eps=eps), tile)


def norm_gated(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, bias: Tensor | None, activation: str, tile: Tile | None = None
) -> Tensor:
    """Return ``reference.gated`` of the norm of ``x``. Takes what ``norm_linear`` takes."""
    return _launch(x, weight, bias, activation, Around(gain=gain, eps=eps), tile)


class Around(NamedTuple):
    """What a product is computed with."""

    gain: Tensor | None = None
    """Of the norm in front."""
    eps: float = 0.0
    residual: Tensor | None = None
    """What is added behind."""


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, around: Around, tile: Tile | None
) -> Tensor:
    rows, (outputs, inputs) = x.shape[0], weight.shape
    assert rows <= most_rows(x.dtype) and weight.is_contiguous(), "the front door sees to it"
    if activation is not None:
        outputs //= 2
    out = torch.empty_like(x[:, :1].expand(-1, outputs), memory_format=torch.contiguous_format)
    if not rows or not outputs:
        return out
    gain, residual = around.gain, around.residual
    if tile is None:
        matrices = x.element_size() == 2 and (gain is None or x.dtype is torch.bfloat16)  # see the head of this file
        pick = choose if matrices else few_tile
        tile = pick(rows, outputs, inputs, activation is not None)
    arguments = (
        x, x if residual is None else residual, x if gain is None else gain, weight, x if bias is None else bias, out,
        rows, outputs, x.stride(0), 0 if residual is None else residual.stride(0), around.eps,
    )  # fmt: skip
    shared = {
        "INPUTS": inputs, "LINES": tile.outputs, "NORM": gain is not None, "ADD": residual is not None,
        "BIAS": bias is not None, "ACTIVATION": activation, "num_warps": tile.warps, **launch_options(x), **FUSED,
    }  # fmt: skip
    grid = (triton.cdiv(outputs, tile.outputs),)
    padded = triton.next_power_of_2(rows)
    if tile.held:
        shared["WAITS"] = min(shared["WAITS"], 1)  # the next kernel's programs would take the room of this one's
        fewest = 16 if tile.outputs * (1 if activation is None else 2) == 8 else 8
        many_kernel[grid](
            *arguments, ROWS=max(padded, fewest), PARTS=tile.warps, CHUNKS=tile.inputs // (32 * tile.warps),
            HELD=tile.held, **shared,
        )  # fmt: skip
    else:
        few_kernel[grid](*arguments, ROWS=padded, COLUMNS=tile.inputs, **shared)
    return out

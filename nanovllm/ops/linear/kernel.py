"""Linear layers for a few rows, alone or between a norm and a gated activation.

With few rows a layer is the reading of its weight, once. What a library loses there is the time in which nothing is
read: while a kernel starts, and while it waits for the one before. So the kernels are cut into enough programs for
every multiprocessor, each of which asks for all of its weights at once and keeps them in registers; the gate behind,
and for the fewest rows the norm in front, are computed on the way; and where the GPU can start a kernel before the
last one has ended (``overlap``), a program asks for its weights first and waits for its rows afterwards:

    kernel before   [ weights | wait | product ]
    this one                     [ weights  | wait | product ]

Two kernels: ``few_kernel`` multiplies and adds, ``many_kernel`` uses the matrix units. Sums are float32 and their order
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

FEW_ROWS, LARGE_FEW_ROWS = 2, 1
"""Up to how many rows that is also faster, for a weight of up to ``LARGE`` numbers and for a larger one."""

LARGE = 16_000_000
"""Numbers in a weight from which on its reading hides less: a multiply-add for each row takes as long."""

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
def _load_sum(x, residual, x_at, residual_at, inside, ADD: tl.constexpr, WHOLE: tl.constexpr):
    """Load a tile of the rows; ``ADD``: plus the residual, rounded to their type."""
    values = _load(x + x_at, inside, WHOLE)
    if ADD:
        more = _load(residual + residual_at, inside, WHOLE)
        return (values.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
    return values


@triton.jit
def _scaled(values, scale, gain):
    """Normalise a tile: rounded before the gain and after it, as ``rms_norm.reference`` does."""
    normed = (values.to(tl.float32) * scale).to(values.dtype)
    return (normed.to(tl.float32) * gain.to(tl.float32)).to(values.dtype)


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
    x, residual, gain, weight, bias, out, total, rows, outputs, x_row, residual_row, eps,
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
    if NORM and TILES == 1:
        gains = _load(gain + column, inside, WHOLE)
    if WAITS and TILES > 1:
        _fetch(weight, first, outputs, COLUMNS, INPUTS, LINES, INPUTS - COLUMNS)
        if GATED:
            _fetch(weight + beyond, first, outputs, COLUMNS, INPUTS, LINES, INPUTS - COLUMNS)
    release(WAITS)  # the weights of the next kernel come after these
    wait(WAITS)

    row = tl.arange(0, ROWS)[:, None, None]
    x_at = tl.minimum(row, rows - 1).to(tl.int64) * x_row + column  # [ROWS, 1, COLUMNS]
    residual_at = tl.minimum(row, rows - 1).to(tl.int64) * residual_row + column
    values = _load_sum(x, residual, x_at, residual_at, inside, ADD, WHOLE)
    scale = 1.0
    if NORM:
        squares = values.to(tl.float32) * values.to(tl.float32)
        for index in tl.static_range(1, TILES):
            start = index * COLUMNS
            more = _load_sum(x, residual, x_at + start, residual_at + start, start + column < INPUTS, ADD, WHOLE)
            squares += more.to(tl.float32) * more.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares, 2, keep_dims=True) / INPUTS + eps)  # [ROWS, 1, 1]

    sums = tl.zeros([ROWS, LINES, COLUMNS], tl.float32)
    up_sums = sums
    for index in tl.static_range(TILES):
        start = index * COLUMNS
        inside = start + column < INPUTS
        if index > 0:
            tile = _load(weights + start, inside, WHOLE)
            if GATED:
                up_tile = _load(up_weights + start, inside, WHOLE)
            values = _load_sum(x, residual, x_at + start, residual_at + start, inside, ADD, WHOLE)
        factors = values
        if NORM:
            if TILES > 1:
                gains = _load(gain + start + column, inside, WHOLE)
            factors = _scaled(values, scale, gains)
        sums += tile.to(tl.float32) * factors.to(tl.float32)
        if GATED:
            up_sums += up_tile.to(tl.float32) * factors.to(tl.float32)

    place = first + tl.arange(0, LINES)[None, :]
    exists = place < outputs
    result = tl.sum(sums, 2)  # [ROWS, LINES]
    if BIAS:
        result += tl.load(bias + place, exists, 0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 2)
        if BIAS:
            up += tl.load(bias + outputs + place, exists, 0.0).to(tl.float32)
        result = _gated(result, up, ACTIVATION, DTYPE)
    out_row = tl.arange(0, ROWS)[:, None]
    tl.store(out + out_row * outputs + place, result.to(DTYPE), exists & (out_row < rows))

    if ADD:  # the first program alone, by the mask: a branch would keep it from what it still holds in registers
        width = tl.where(tl.program_id(0) == 0, INPUTS, 0)
        for index in tl.static_range(TILES):
            start = index * COLUMNS
            inside = (row < rows) & (start + column < width)
            if TILES > 1:
                values = _load_sum(x, residual, x_at + start, residual_at + start, inside, ADD, False)
            tl.store(total + row * INPUTS + start + column, values, inside)


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
    x, weight, bias, out, rows, outputs, x_row,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    HELD: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WAITS: tl.constexpr,
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
    place, column = _places(ALL, PARTS, CHUNKS)
    line = tl.minimum(first + place % LINES, outputs - 1).to(tl.int64)  # int64: beyond 2**31
    if GATED:
        line += place // LINES * (tl.full((), 1, tl.int64) * outputs)  # the second half is of ``up``
    weights = weight + line * INPUTS + column
    tiles = ()
    for index in tl.static_range(AT_ONCE):
        start = index * COLUMNS
        tiles += (_load(weights + start, start + column < INPUTS, WHOLE),)
    release(WAITS)  # the weights of the next kernel come after these
    wait(WAITS)

    row, x_column = _places(ROWS, PARTS, CHUNKS)
    x_at = x + tl.minimum(row, rows - 1).to(tl.int64) * x_row + x_column
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
        tile = _operand(tiles[index], ALL, PARTS, CHUNKS)
        factor = _operand(factors[index], ROWS, PARTS, CHUNKS)
        if ALL == 8:
            sums = tl.dot(factor, tl.permute(tile, (0, 2, 1)), sums)
        else:
            sums = tl.dot(tile, tl.permute(factor, (0, 2, 1)), sums)

    result = tl.sum(sums, 0)
    if ALL > 8:
        result = tl.trans(result)  # [ROWS, ALL]
    place = first + tl.arange(0, LINES)[None, :]
    exists = place < outputs
    if GATED:
        result, up = tl.split(tl.permute(tl.reshape(result, (ROWS, 2, LINES)), (0, 2, 1)))
        if BIAS:
            up += tl.load(bias + outputs + place, exists, 0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + place, exists, 0.0).to(tl.float32)
    if GATED:
        result = _gated(result, up, ACTIVATION, DTYPE)
    out_row = tl.arange(0, ROWS)[:, None]
    tl.store(out + out_row * outputs + place, result.to(DTYPE), exists & (out_row < rows))


def most_rows(dtype: torch.dtype) -> int:
    """Return how many rows a call may have."""
    return FEW if dtype is torch.float32 else MAX_ROWS


def choose(rows: int, outputs: int, inputs: int, gated: bool, dtype: torch.dtype = torch.bfloat16) -> Tile:
    """Return the tile for a product; ``outputs`` of a gated one are those behind the gate.

    A program holds its weights in registers, 8 to 16 KiB without the matrix units and 32 with them: with 132
    multiprocessors, all of a layer of Qwen3-0.6B fits in them at once. Figures of ``bench/linear.py`` on an H200.
    """
    large = outputs * inputs * (2 if gated else 1) > LARGE
    if rows <= (FEW if dtype is torch.float32 else LARGE_FEW_ROWS if large else FEW_ROWS):
        return few_tile(rows, outputs, inputs, gated)
    return many_tile(rows, outputs, inputs, gated)


def few_tile(rows: int, outputs: int, inputs: int, gated: bool) -> Tile:
    """Return the tile for ``few_kernel``."""
    if inputs <= 1024:  # one tile, with which the norm needs one pass
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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """See ``reference.linear``. Takes up to ``most_rows`` rows, which may lie apart; the weight is contiguous."""
    out = torch.empty_like(x[:, :1].expand(-1, weight.shape[0]), memory_format=torch.contiguous_format)
    _launch(x, None, None, 0.0, weight, bias, out, None, None, tile)
    return out


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, tile: Tile | None = None) -> Tensor:
    """See ``reference.gated``. Takes what ``linear`` takes."""
    out = torch.empty_like(x[:, :1].expand(-1, weight.shape[0] // 2), memory_format=torch.contiguous_format)
    _launch(x, None, None, 0.0, weight, bias, out, None, activation, tile)
    return out


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.norm_linear``. Takes up to ``FEW`` rows of up to ``WIDEST`` inputs."""
    out = torch.empty_like(x[:, :1].expand(-1, weight.shape[0]), memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, residual, norm_weight, eps, weight, bias, out, total, None, tile)
    return out, total


def norm_gated(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``reference.norm_gated``. Takes up to ``FEW`` rows of up to ``WIDEST`` inputs."""
    out = torch.empty_like(x[:, :1].expand(-1, weight.shape[0] // 2), memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, residual, norm_weight, eps, weight, bias, out, total, activation, tile)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    activation: str | None,
    tile: Tile | None,
) -> None:
    rows, (outputs, inputs) = x.shape[0], (out.shape[1], weight.shape[1])
    assert rows <= most_rows(x.dtype) and weight.is_contiguous(), "the front door sees to it"
    if not rows or not outputs:
        return
    if tile is None and gain is not None:
        tile = few_tile(rows, outputs, inputs, activation is not None)
    elif tile is None:
        tile = choose(rows, outputs, inputs, activation is not None, x.dtype)
    grid = (triton.cdiv(outputs, tile.outputs),)
    shared = {
        "INPUTS": inputs, "LINES": tile.outputs, "BIAS": bias is not None, "ACTIVATION": activation,
        "num_warps": tile.warps, **launch_options(x), **FUSED,
    }  # fmt: skip
    padded = triton.next_power_of_2(rows)
    no_bias = x if bias is None else bias
    if tile.held:
        assert gain is None, "norms are computed without the matrix units"
        shared["WAITS"] = min(shared["WAITS"], 1)  # the next kernel's programs would take the room of this one's
        fewest = 16 if tile.outputs * (1 if activation is None else 2) == 8 else 8
        many_kernel[grid](
            x, weight, no_bias, out, rows, outputs, x.stride(0), ROWS=max(padded, fewest), PARTS=tile.warps,
            CHUNKS=tile.inputs // (32 * tile.warps), HELD=tile.held, **shared,
        )  # fmt: skip
        return
    few_kernel[grid](
        x, x if residual is None else residual, x if gain is None else gain, weight, no_bias, out,
        x if total is None else total, rows, outputs, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        ROWS=padded, COLUMNS=tile.inputs, NORM=gain is not None, ADD=residual is not None, **shared,
    )  # fmt: skip

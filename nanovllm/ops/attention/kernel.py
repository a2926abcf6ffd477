"""Paged attention in Triton: one kernel for decodes, one that puts split decodes together, one for longer spans.

All of them read the cache through the block table, token by token, so a tile of keys may lie in any number of blocks
of any size. Softmax runs over the tiles in powers of two and in float32, with a running maximum (``top``), sum of
weights (``weight``) and weighted sum of values (``mixed``). Places that hold no token of the request are never read.

A request's numbers do not depend on its neighbours. A decode is cut into chunks whose length follows from its own
context alone; each chunk is summed from nothing, and the sums are added from left to right. Whether one program does
all that or each chunk has its own is a matter of speed: the arithmetic is the same. Multiply-adds are written out
and the compiler is told to fuse no others, so that it does not treat one loop unlike another.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _load(base, offsets, live, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load [rows, DIM]: 0 past HEAD_DIM and, if MASKED, in rows that are not live."""
    dims = tl.arange(0, DIM)
    pointers = base + offsets[:, None] + dims[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif DIM > HEAD_DIM:
        rows = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def _find(
    table, places, live, kv_head, block_stride, slot_stride, head_stride,
    BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return where in the cache the tokens ``places`` of a request lie, for one key-value head."""
    if MASKED:
        blocks = tl.load(table + places // BLOCK_SIZE, mask=live, other=0)
    else:
        blocks = tl.load(table + places // BLOCK_SIZE)
    # int64: block 32,768 of 64 tokens by 8 heads by 128 channels begins at 2**31
    inside = (places % BLOCK_SIZE).to(tl.int64) * slot_stride + kv_head.to(tl.int64) * head_stride
    return blocks.to(tl.int64) * block_stride + inside


@triton.jit
def _update(q, k, v, seen, mixed, weight, top, factor, MASKED: tl.constexpr):
    """Add a tile of keys and values to the sums; if MASKED, only where ``seen``."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [rows, BLOCK_N]
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    base = new_top
    if MASKED:  # a row that has seen nothing yet
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp2(top - base)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return mixed, tl.fma(weight, fade, tl.sum(weights, 1)), new_top


@triton.jit
def _add(mixed, weight, top, more, more_weight, more_top):
    """Add the sums of a chunk to those of the chunks before it."""
    new_top = tl.maximum(top, more_top)
    fade, more_fade = tl.exp2(top - new_top), tl.exp2(more_top - new_top)
    mixed = tl.fma(mixed, fade[:, None], more * more_fade[:, None])
    return mixed, tl.fma(weight, fade, more_weight * more_fade), new_top


@triton.jit(do_not_specialize=["split"])
def _decode(
    query, keys, values, out, parts, decodes, owners, tables, split, factor, row_stride, query_head_stride,
    block_stride, slot_stride, head_stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One token of one request, the GROUP query heads of one key-value head: all of the context, or one chunk."""
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    owner = part
    if split != 0:
        owner = tl.load(owners + part)
    row = tl.load(decodes + owner * 5).to(tl.int64)
    context = tl.load(decodes + owner * 5 + 1)
    table = tables + tl.load(decodes + owner * 5 + 2)
    chunk = tl.load(decodes + owner * 5 + 3)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    begin = first
    stop = context
    if split != 0:
        begin = first + (part - tl.load(decodes + owner * 5 + 4)) * chunk
        stop = tl.minimum(begin + chunk, context)
    if begin >= context:  # the plan counts chunks of the whole context, a window needs fewer
        return

    lanes = tl.arange(0, ROWS)
    heads = kv_head * GROUP + lanes
    dims = tl.arange(0, DIM)
    # the lanes past GROUP fill the smallest tile that tensor cores take
    q = _load(query + row * row_stride, heads * query_head_stride, lanes < GROUP, HEAD_DIM, DIM, True)
    total = tl.zeros([ROWS, DIM], tl.float32)
    total_weight = tl.zeros([ROWS], tl.float32)
    total_top = tl.full([ROWS], float("-inf"), tl.float32)
    mixed, weight, top = total, total_weight, total_top
    tiles = (stop - begin) // BLOCK_N
    for tile in range(tiles):
        places = begin + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live = places < stop
        offsets = _find(table, places, live, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, False)
        k = _load(keys, offsets, live, HEAD_DIM, DIM, False)
        v = _load(values, offsets, live, HEAD_DIM, DIM, False)
        mixed, weight, top = _update(q, k, v, live[None, :], mixed, weight, top, factor, False)
        if (tile + 1) % (chunk // BLOCK_N) == 0:
            total, total_weight, total_top = _add(total, total_weight, total_top, mixed, weight, top)
            mixed = tl.zeros([ROWS, DIM], tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
    if begin + tiles * BLOCK_N < stop:
        places = begin + tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        live = places < stop
        offsets = _find(table, places, live, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, True)
        k = _load(keys, offsets, live, HEAD_DIM, DIM, True)
        v = _load(values, offsets, live, HEAD_DIM, DIM, True)
        mixed, weight, top = _update(q, k, v, live[None, :], mixed, weight, top, factor, True)
    total, total_weight, total_top = _add(total, total_weight, total_top, mixed, weight, top)

    num_heads = tl.num_programs(0) * GROUP
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    if (split == 0) | (context - first <= chunk):
        pointers = out + (row * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(pointers, (total / total_weight[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        place = parts + (part.to(tl.int64) * num_heads + heads) * (HEAD_DIM + 2)
        tl.store(place[:, None] + dims[None, :], total, mask=mask)
        tl.store(place + HEAD_DIM, total_weight, mask=lanes < GROUP)
        tl.store(place + HEAD_DIM + 1, total_top, mask=lanes < GROUP)


@triton.jit
def _join(parts, out, decodes, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, TOGETHER: tl.constexpr):
    """Add the chunks of one head of one decode, from left to right; nothing to do if it has one."""
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    owner = tl.program_id(1)
    row = tl.load(decodes + owner * 5).to(tl.int64)
    seen = tl.load(decodes + owner * 5 + 1)
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW)
    chunk = tl.load(decodes + owner * 5 + 3)
    if seen <= chunk:
        return
    count = tl.cdiv(seen, chunk)
    place = parts + (tl.load(decodes + owner * 5 + 4).to(tl.int64) * num_heads + head) * (HEAD_DIM + 2)
    dims = tl.arange(0, DIM)
    one = tl.arange(0, 1)
    total = tl.zeros([1, DIM], tl.float32)
    total_weight = tl.zeros([1], tl.float32)
    total_top = tl.full([1], float("-inf"), tl.float32)
    for start in range(0, count, TOGETHER):
        # unrolled, so that the loads of several chunks are under way at once; adding an empty chunk changes nothing
        for ahead in tl.static_range(TOGETHER):
            live = one + start + ahead < count
            at = place + (one + start + ahead).to(tl.int64) * num_heads * (HEAD_DIM + 2)
            mixed = tl.load(at[:, None] + dims[None, :], mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            weight = tl.load(at + HEAD_DIM, mask=live, other=0.0)
            top = tl.load(at + HEAD_DIM + 1, mask=live, other=float("-inf"))
            total, total_weight, total_top = _add(total, total_weight, total_top, mixed, weight, top)
    pointers = out + (row * num_heads + head + one[:, None]) * HEAD_DIM + dims[None, :]
    result = (total / total_weight[:, None]).to(out.dtype.element_ty)
    tl.store(pointers, result, mask=(dims < HEAD_DIM)[None, :])


@triton.jit
def _prefill(
    query, keys, values, out, pieces, tables, factor, row_stride, query_head_stride,
    block_stride, slot_stride, head_stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M new tokens of one request, one query head.

    Tiles of keys begin at multiples of BLOCK_N, so that a row's numbers do not depend on where its piece begins.
    """
    head = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(pieces + piece * 4).to(tl.int64)
    size = tl.load(pieces + piece * 4 + 1)
    position = tl.load(pieces + piece * 4 + 2)
    table = tables + tl.load(pieces + piece * 4 + 3)
    kv_head = head // GROUP
    num_heads = tl.num_programs(0)

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    q_offsets = (row + lanes) * row_stride + head * query_head_stride
    q = _load(query, q_offsets, lanes < size, HEAD_DIM, DIM, True)
    mixed = tl.zeros([BLOCK_M, DIM], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    stop = position + size
    begin = 0
    common = (position + 1) // BLOCK_N * BLOCK_N  # every row sees all of [begin, common)
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        common = begin
    for start in range(begin, common, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        live = places < stop
        offsets = _find(table, places, live, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, False)
        k = _load(keys, offsets, live, HEAD_DIM, DIM, False)
        v = _load(values, offsets, live, HEAD_DIM, DIM, False)
        mixed, weight, top = _update(q, k, v, live[None, :], mixed, weight, top, factor, False)
    for start in range(common, stop, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        live = places < stop
        offsets = _find(table, places, live, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, True)
        k = _load(keys, offsets, live, HEAD_DIM, DIM, True)
        v = _load(values, offsets, live, HEAD_DIM, DIM, True)
        ages = (position + lanes)[:, None] - places[None, :]  # how far back each key lies
        seen = ages >= 0
        if WINDOW > 0:
            seen = seen & (ages < WINDOW)
        mixed, weight, top = _update(q, k, v, seen, mixed, weight, top, factor, True)
    pointers = out + ((row + lanes)[:, None] * num_heads + head) * HEAD_DIM + dims[None, :]
    mask = (lanes < size)[:, None] & (dims < HEAD_DIM)[None, :]
    weight = tl.where(lanes < size, weight, 1.0)
    tl.store(pointers, (mixed / weight[:, None]).to(out.dtype.element_ty), mask=mask)


LOG2_E = 1.4426950408889634


def _widths(query, keys, scale, window):
    """Return the arguments that all kernels share: positional ones and keywords."""
    assert query.stride(2) == keys.stride(3) == 1
    head_dim = keys.shape[3]
    numbers = (scale * LOG2_E, *query.stride()[:2], *keys.stride()[:3])
    shared = {
        "GROUP": query.shape[1] // keys.shape[2],
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": keys.shape[1],
        "WINDOW": window or 0,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "enable_fp_fusion": False,  # multiply-adds are written out: the same bits in every loop
    }
    return numbers, shared


def decode(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, parts: Tensor | None, decodes: Tensor, owners: Tensor,
    tables: Tensor, scale: float, window: int | None, block_n: int, warps: int, stages: int,
) -> None:  # fmt: skip
    """Attend spans of one token: each chunk by a program of its own, with a row of ``parts`` for its sums; or uncut."""
    assert keys.stride() == values.stride()
    numbers, shared = _widths(query, keys, scale, window)
    split = parts is not None
    rows = max(16, triton.next_power_of_2(shared["GROUP"]))
    _decode[keys.shape[2], (owners if split else decodes).shape[0]](
        query, keys, values, out, parts if split else out, decodes, owners, tables, int(split), *numbers, **shared,
        ROWS=rows, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if split:
        names = ("HEAD_DIM", "WINDOW", "DIM", "enable_fp_fusion")
        _join[query.shape[1], decodes.shape[0]](
            parts, out, decodes, **{name: shared[name] for name in names}, TOGETHER=8, num_warps=1
        )


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, pieces: Tensor, tables: Tensor, scale: float,
    window: int | None, block_m: int, block_n: int, warps: int, stages: int,
) -> None:  # fmt: skip
    """Attend spans of several tokens, cut into ``pieces`` of at most ``block_m``."""
    assert keys.stride() == values.stride()
    numbers, shared = _widths(query, keys, scale, window)
    _prefill[query.shape[1], pieces.shape[0]](
        query, keys, values, out, pieces, tables, *numbers, **shared,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip

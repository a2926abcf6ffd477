"""Paged attention in Triton: for decodes, for what decodes share, for putting split ones together, for longer spans.

All of them read the cache through the block table, so a tile of keys may lie in any number of blocks of any size;
where tiles are known to lie in one block each (ONE), its number is one load and a tile's rows lie equally far apart.
The blocks of a tile are looked up while the tile before it is loaded: the compiler then keeps all stages of its
pipeline for keys and values, and none of them waits for the table. Softmax runs over the tiles in powers of two and in
float32, with a running maximum (``top``), sum of weights (``weight``) and weighted sum of values (``mixed``). Places
that hold no token of the request are never read.

A decode is cut into chunks whose length follows from its own context alone; each chunk is summed from nothing, and the
sums are added from left to right. With tiles of one size, whether one program does all that or each chunk has its own
is a matter of speed: the arithmetic is the same. Multiply-adds are written out and the compiler is told to fuse no
others, so that it does not treat one loop unlike another.

A chunk whose blocks several decodes have in common is summed for all of them by one program, which loads its keys and
values once. The sums go where each decode's own program would have put them; its tiles have more rows, so the last
bits may be others.

A cache of float8 holds numbers that have been divided by a scale, one for the keys and one for the values of a head.
A tile is turned into 16 bits as soon as it is loaded; the scale of the keys is a factor of the scores, that of the
values a factor of the result. Decodes load float8 two by two, and sum the channels of even and of odd number apart:
what the matrix units multiply comes from shared memory in any order if it has 16 bits, byte by byte if it has 8. For
prefill, where each tile meets many queries, that is three times as slow.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.overlap import fetch, launch_options, release, wait


@triton.jit
def _load(base, offsets, live, dtype, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load [rows, DIM] as ``dtype``: 0 past HEAD_DIM and, if MASKED, in rows that are not live."""
    return _load_some(base, offsets, live, dtype, HEAD_DIM, DIM, 1, MASKED)


@triton.jit
def _load_some(
    base, offsets, live, dtype, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr
):
    """Load [rows, DIM], every ``STEP``-th channel, as ``_load`` does."""
    dims = tl.arange(0, DIM)
    pointers = base + offsets[:, None] + (dims * STEP)[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif DIM > HEAD_DIM:
        rows = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    if rows.dtype != dtype:
        rows = rows.to(tl.float32).to(dtype)  # Triton 3.6 cannot turn float8 into bfloat16 at once on 8.9
    return rows


@triton.jit
def _halves(words, NATIVE: tl.constexpr):
    """Return the float8 in the lower and in the upper half of words of 16 bits, as float16, which has all of them."""
    if NATIVE:  # two words at a time: convert both of one word, then sort them
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .b32 x, y;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 x, a;
            cvt.rn.f16x2.e4m3x2 y, b;
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632; }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:  # the bits are those of a float16 but for the exponent, which counts from another number: 2**-8 too small
        low = (((words & 0x80) << 8) | ((words & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256
        high = ((words & 0x8000) | ((words & 0x7F00) >> 1)).to(tl.float16, bitcast=True) * 256
    return low, high


@triton.jit
def _load_cached(
    base, offsets, live, dtype, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load keys or values as a tuple of [rows, DIM]: all channels, or those of even and those of odd number."""
    found = ()
    if PARTS == 1:
        found += (_load(base, offsets, live, dtype, HEAD_DIM, DIM, MASKED),)
    else:
        low, high = _halves(_load(base, offsets, live, tl.uint16, HEAD_DIM, DIM, MASKED), NATIVE)
        found += (low.to(dtype), high.to(dtype))
    return found


@triton.jit
def _look_up(table, start, stop, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ONE: tl.constexpr):
    """Return the blocks of the BLOCK_N tokens from ``start``, or if ONE their block; past ``stop``, the last one."""
    places = start if ONE else start + tl.arange(0, BLOCK_N)
    return tl.load(table + tl.minimum(places, stop - 1) // BLOCK_SIZE)


@triton.jit
def _find(
    blocks, start, kv_head, block_stride, slot_stride, head_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Return where in the cache the BLOCK_N tokens from ``start`` lie, for one key-value head: a number and a row each.

    ``blocks`` comes from ``_look_up``.
    """
    # int64: block 32,768 of 64 tokens by 8 heads by 128 channels begins at 2**31
    origin = kv_head.to(tl.int64) * head_stride
    if ONE:
        origin += blocks.to(tl.int64) * block_stride + (start % BLOCK_SIZE) * slot_stride
        rows = tl.arange(0, BLOCK_N) * slot_stride
    else:
        inside = (start + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
        rows = blocks.to(tl.int64) * block_stride + inside * slot_stride
    return origin, rows


@triton.jit
def _update(q, k, v, seen, mixed, weight, top, factor, cap, MASKED: tl.constexpr):
    """Add a tile of keys and values to the sums; if MASKED, only where ``seen``."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [rows, BLOCK_N]
    weights, fade, weight, top = _weigh(scores, seen, weight, top, factor, cap, MASKED)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return mixed, weight, top


@triton.jit
def _weigh(scores, seen, weight, top, factor, cap, MASKED: tl.constexpr):
    """Return a tile's weights, the factor for the sums so far, the new sum of weights and the new maximum.

    Scores count ``factor`` times. With a ``cap``, their tanh(x) = (1 - exp(-2 x)) / (1 + exp(-2 x)) count that many
    times, and ``factor`` makes of a score the logarithm to base 2 of exp(2 x).
    """
    if cap is not None:
        scores *= factor
        power = tl.exp2(-tl.abs(scores))
        bound = (1 - power) / (1 + power)
        scores = tl.where(scores < 0, -bound, bound)
        factor = cap
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    base = new_top
    if MASKED:  # a row that has seen nothing yet
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp2(top - base)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    return weights, fade, tl.fma(weight, fade, tl.sum(weights, 1)), new_top


@triton.jit
def _add(mixed, weight, top, more, more_weight, more_top):
    """Add the sums of a chunk to those of the chunks before it."""
    new_top = tl.maximum(top, more_top)
    fade, more_fade = tl.exp2(top - new_top), tl.exp2(more_top - new_top)
    mixed = tl.fma(mixed, fade[:, None], more * more_fade[:, None])
    return mixed, tl.fma(weight, fade, more_weight * more_fade), new_top


@triton.jit
def _update_parts(q, k, v, seen, mixed, weight, top, factor, cap, PARTS: tl.constexpr, MASKED: tl.constexpr):
    """``_update`` for tuples: of all channels, or of even and of odd ones."""
    scores = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")  # [rows, BLOCK_N]
    for part in tl.static_range(1, PARTS):
        scores = tl.dot(q[part], tl.trans(k[part]), scores, input_precision="ieee")
    weights, fade, weight, top = _weigh(scores, seen, weight, top, factor, cap, MASKED)
    sums = ()
    for part in tl.static_range(PARTS):
        sums += (tl.dot(weights.to(v[part].dtype), v[part], mixed[part] * fade[:, None], input_precision="ieee"),)
    return sums, weight, top


@triton.jit
def _zeros(ROWS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr):
    """Return ``PARTS`` sums of nothing."""
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([ROWS, DIM], tl.float32),)
    return sums


@triton.jit
def _add_parts(mixed, weight, top, more, more_weight, more_top, PARTS: tl.constexpr):
    """``_add`` for tuples."""
    sums = ()
    for part in tl.static_range(PARTS):
        total, new_weight, new_top = _add(mixed[part], weight, top, more[part], more_weight, more_top)
        sums += (total,)
    return sums, new_weight, new_top


@triton.jit
def _fetch(
    cache, table, begin, stop, kv_head, block_stride, slot_stride, head_stride, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Ask for the keys, or values, of the ``TOKENS`` from ``begin`` to be brought to the L2 cache, and go on."""
    BYTES: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM * BYTES + 127) // 128)  # cache lines of 128 bytes
    places = tl.minimum(begin + tl.arange(0, TOKENS), stop - 1)
    blocks = tl.load(table + places // BLOCK_SIZE).to(tl.int64)
    rows = blocks * block_stride + places % BLOCK_SIZE * slot_stride + kv_head.to(tl.int64) * head_stride
    bytes_in = tl.minimum(tl.arange(0, LINES) * 128, (HEAD_DIM - 1) * BYTES)
    fetch((cache + rows).to(tl.int64)[:, None] + bytes_in[None, :])


@triton.jit
def _turn(
    base, offsets, live, is_key, q_norm, k_norm, eps, cos, sin,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Load ROWS heads; return them as they are, and normalised and rotated as ``rotate_and_store.reference`` does it.

    Both as ``PARTS``. ``is_key``: which have the norm of keys. Each channel is mixed with the one half a head away,
    which is loaded a second time: it belongs to another thread. All loads come first and have one shape, so that
    nothing waits for the second while the third has not been asked for, and nothing has to change hands.
    """
    own = base.dtype.element_ty
    raw, other, gains, other_gains, cosines, sines = (), (), (), (), (), ()
    for index in tl.static_range(PARTS):
        channel = tl.arange(0, WIDTH) * PARTS + index
        here = tl.broadcast_to(channel[None, :], (ROWS, WIDTH))
        there = (here + HEAD_DIM // 2) % HEAD_DIM
        inside = here < HEAD_DIM
        mask = live[:, None] & inside
        raw += (tl.load(base + offsets[:, None] + here, mask, 0.0),)
        other += (tl.load(base + offsets[:, None] + there, mask, 0.0),)
        cosines += (tl.load(cos + here, inside, 0.0).to(tl.float32),)
        sines += (tl.load(sin + here, inside, 0.0).to(tl.float32),)
        if q_norm is not None:
            keys, queries = mask & is_key[:, None], mask & ~is_key[:, None]
            gains += (tl.load(q_norm + here, queries, 0.0) + tl.load(k_norm + here, keys, 0.0),)
            other_gains += (tl.load(q_norm + there, queries, 0.0) + tl.load(k_norm + there, keys, 0.0),)
    scale = 1.0
    if q_norm is not None:
        squares = tl.zeros([ROWS], tl.float32)
        for index in tl.static_range(PARTS):
            x = raw[index].to(tl.float32)
            squares += tl.sum(x * x, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    turned = ()
    for index in tl.static_range(PARTS):
        x, y = raw[index].to(tl.float32), other[index].to(tl.float32)
        if q_norm is not None:
            x = (x * scale).to(own).to(tl.float32) * gains[index].to(tl.float32)
            y = (y * scale).to(own).to(tl.float32) * other_gains[index].to(tl.float32)
            x, y = x.to(own).to(tl.float32), y.to(own).to(tl.float32)
        turned += (((x * cosines[index]).to(own).to(tl.float32) + y * sines[index]).to(own),)
    return raw, turned


@triton.jit
def _keep(place, rows, which, scales, head, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Write the row that ``which`` says to its place in the cache; divided by a scale, if any, as ``quantize`` does."""
    for index in tl.static_range(PARTS):
        row = rows[index]
        if scales is not None:
            row = tl.div_rn(row.to(tl.float32), tl.load(scales + head))
            row = tl.clamp(row, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        channel = (tl.arange(0, WIDTH) * PARTS + index)[None, :]
        places = tl.broadcast_to(place + channel, row.shape)
        tl.store(places, row.to(place.dtype.element_ty), which[:, None] & (channel < HEAD_DIM))


@triton.jit(do_not_specialize=["split"])
def _decode(
    query, keys, values, key_scales, value_scales, q_norm, k_norm, eps, cos, sin, out, parts, decodes, owners, rest,
    tables, split, factor, cap, row_stride, query_head_stride, angle_stride, block_stride, slot_stride, head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """One token of one request, the GROUP query heads of one key-value head: all of the context, or one chunk.

    ``split``: 0 uncut; 1 each part a program; 2 only the parts listed in ``rest``, where -1 is padding.

    With ``cos`` and ``sin`` the queries are not ready, nor are the token's key and value, which lie behind the queries,
    in the cache: what ``rotate_and_store`` would do is done here, by each program for its queries and by that of the
    last chunk for the key and the value. ``AHEAD``: tokens whose keys and values are asked for before the kernel in
    front has ended.
    """
    FLOAT8: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    PARTS: tl.constexpr = 2 if FLOAT8 and HEAD_DIM % 2 == 0 and DIM >= 32 else 1
    SOME: tl.constexpr = HEAD_DIM // PARTS  # channels of a part
    WIDTH: tl.constexpr = DIM // PARTS
    dtype = query.dtype.element_ty
    all_keys, all_values = keys, values
    all_strides = (block_stride, slot_stride, head_stride)
    if PARTS == 2:
        dtype = tl.float32 if dtype == tl.float32 else tl.float16
        keys = keys.to(tl.pointer_type(tl.uint16), bitcast=True)
        values = values.to(tl.pointer_type(tl.uint16), bitcast=True)
        block_stride //= 2
        slot_stride //= 2
        head_stride //= 2
    release(WAITS)
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    if split == 2:
        part = tl.load(rest + part)
    if part < 0:
        wait(WAITS)
        return
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
        wait(WAITS)
        return

    if key_scales is not None:
        factor *= tl.load(key_scales + kv_head)
    lanes = tl.arange(0, ROWS)
    heads = kv_head * GROUP + lanes
    # a window begins anywhere, a chunk where a tile does
    ONE: tl.constexpr = WINDOW == 0 and BLOCK_SIZE % BLOCK_N == 0
    blocks = _look_up(table, begin, stop, BLOCK_SIZE, BLOCK_N, ONE)
    newest = tl.load(table + (context - 1) // BLOCK_SIZE)
    if WAITS and AHEAD > 0:
        _fetch(all_keys, table, begin, stop, kv_head, *all_strides, HEAD_DIM, BLOCK_SIZE, AHEAD)
        _fetch(all_values, table, begin, stop, kv_head, *all_strides, HEAD_DIM, BLOCK_SIZE, AHEAD)
    wait(WAITS)  # for the queries, and the newest token's key and value
    # the lanes past GROUP fill the smallest tile that tensor cores take
    query += row * row_stride
    if cos is None:
        q = ()
        for index in tl.static_range(PARTS):
            offsets = heads * query_head_stride + index
            q += (_load_some(query, offsets, lanes < GROUP, dtype, SOME, WIDTH, PARTS, True),)
    else:
        cos += row * angle_stride
        sin += row * angle_stride
        # the key and the value are two rows more, whose products nobody reads
        is_key, is_value = lanes == GROUP, lanes == GROUP + 1
        kinds = tl.num_programs(0) * (GROUP + tl.where(is_value, 1, 0)) + kv_head
        at = tl.where(lanes < GROUP, heads, kinds) * query_head_stride
        raw, turned = _turn(
            query, at, lanes < GROUP + 2, is_key, q_norm, k_norm, eps, cos, sin, HEAD_DIM, ROWS, WIDTH, PARTS
        )
        q = ()
        for index in tl.static_range(PARTS):
            q += (turned[index].to(dtype),)
        if stop == context:
            slot = newest.to(tl.int64) * all_strides[0]
            slot += (context - 1) % BLOCK_SIZE * all_strides[1] + kv_head.to(tl.int64) * all_strides[2]
            _keep(all_keys + slot, turned, is_key, key_scales, kv_head, HEAD_DIM, WIDTH, PARTS)
            _keep(all_values + slot, raw, is_value, value_scales, kv_head, HEAD_DIM, WIDTH, PARTS)
            tl.debug_barrier()  # other threads of this program will read it
    total = _zeros(ROWS, WIDTH, PARTS)
    total_weight = tl.zeros([ROWS], tl.float32)
    total_top = tl.full([ROWS], float("-inf"), tl.float32)
    mixed, weight, top = total, total_weight, total_top
    tiles = (stop - begin) // BLOCK_N
    for tile in range(tiles):
        start = begin + tile * BLOCK_N
        live = start + tl.arange(0, BLOCK_N) < stop
        origin, rows = _find(blocks, start, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, BLOCK_N, ONE)
        blocks = _look_up(table, start + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N, ONE)
        k = _load_cached(keys + origin, rows, live, dtype, SOME, WIDTH, PARTS, NATIVE, False)
        v = _load_cached(values + origin, rows, live, dtype, SOME, WIDTH, PARTS, NATIVE, False)
        mixed, weight, top = _update_parts(q, k, v, live[None, :], mixed, weight, top, factor, cap, PARTS, False)
        if (tile + 1) % (chunk // BLOCK_N) == 0:
            total, total_weight, total_top = _add_parts(total, total_weight, total_top, mixed, weight, top, PARTS)
            mixed = _zeros(ROWS, WIDTH, PARTS)
            weight = tl.zeros([ROWS], tl.float32)
            top = tl.full([ROWS], float("-inf"), tl.float32)
    # what is left is one tile at most; as a loop its keys and values are under way together, and take fewer registers
    for start in range(begin + tiles * BLOCK_N, stop, BLOCK_N):
        live = start + tl.arange(0, BLOCK_N) < stop
        origin, rows = _find(blocks, start, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, BLOCK_N, ONE)
        k = _load_cached(keys + origin, rows, live, dtype, SOME, WIDTH, PARTS, NATIVE, True)
        v = _load_cached(values + origin, rows, live, dtype, SOME, WIDTH, PARTS, NATIVE, True)
        mixed, weight, top = _update_parts(q, k, v, live[None, :], mixed, weight, top, factor, cap, PARTS, True)
    total, total_weight, total_top = _add_parts(total, total_weight, total_top, mixed, weight, top, PARTS)

    num_heads = tl.num_programs(0) * GROUP
    dims = tl.arange(0, WIDTH)
    mask = (lanes < GROUP)[:, None] & (dims < SOME)[None, :]
    if (split == 0) | (context - first <= chunk):
        scale = 1.0
        if value_scales is not None:
            scale = tl.load(value_scales + kv_head)
        pointers = out + (row * num_heads + heads[:, None]) * HEAD_DIM
        for index in tl.static_range(PARTS):
            result = total[index] / total_weight[:, None] * scale
            tl.store(pointers + (dims * PARTS + index)[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        place = parts + (part.to(tl.int64) * num_heads + heads) * (HEAD_DIM + 2)
        for index in tl.static_range(PARTS):
            tl.store(place[:, None] + (dims * PARTS + index)[None, :], total[index], mask=mask)
        tl.store(place + HEAD_DIM, total_weight, mask=lanes < GROUP)
        tl.store(place + HEAD_DIM + 1, total_top, mask=lanes < GROUP)


@triton.jit
def _shared(
    query, keys, values, key_scales, parts, decodes, shared, tables, factor, cap, row_stride, query_head_stride,
    block_stride, slot_stride, head_stride, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of a chunk that decodes have in common: GROUP query heads of one key-value head of each, in turn.

    A line of ``shared`` that counts no decodes is padding.
    """
    release(WAITS)
    begin = tl.program_id(0) * BLOCK_M
    kv_head = tl.program_id(1)
    item = tl.program_id(2)
    first = tl.load(shared + item * 3)
    count = tl.load(shared + item * 3 + 1) * GROUP
    if begin >= count:
        wait(WAITS)
        return
    place = tl.load(shared + item * 3 + 2)  # how many chunks lie before it
    table = tables + tl.load(decodes + first * 5 + 2)
    chunk = tl.load(decodes + first * 5 + 3)
    if key_scales is not None:
        factor *= tl.load(key_scales + kv_head)
    lanes = begin + tl.arange(0, BLOCK_M)
    live = lanes < count
    lines = decodes + (first + lanes // GROUP) * 5
    heads = kv_head * GROUP + lanes % GROUP
    rows = tl.load(lines, mask=live, other=0).to(tl.int64)
    start = place * chunk
    stop = start + chunk
    ONE: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    blocks = _look_up(table, start, stop, BLOCK_SIZE, BLOCK_N, ONE)
    wait(WAITS)
    q = _load(query, rows * row_stride + heads * query_head_stride, live, query.dtype.element_ty, HEAD_DIM, DIM, True)
    mixed = tl.zeros([BLOCK_M, DIM], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    everyone = tl.full([BLOCK_N], True, tl.int1)
    for here in range(start, stop, BLOCK_N):
        origin, offsets = _find(blocks, here, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, BLOCK_N, ONE)
        blocks = _look_up(table, here + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N, ONE)
        k = _load(keys + origin, offsets, everyone, q.dtype, HEAD_DIM, DIM, False)
        v = _load(values + origin, offsets, everyone, q.dtype, HEAD_DIM, DIM, False)
        mixed, weight, top = _update(q, k, v, everyone[None, :], mixed, weight, top, factor, cap, False)
    dims = tl.arange(0, DIM)
    # of the parts; looked up so late because registers are scarce
    numbers = tl.load(lines + 4, mask=live, other=0).to(tl.int64) + place
    pointers = parts + (numbers * (tl.num_programs(1) * GROUP) + heads) * (HEAD_DIM + 2)
    tl.store(pointers[:, None] + dims[None, :], mixed, mask=live[:, None] & (dims < HEAD_DIM)[None, :])
    tl.store(pointers + HEAD_DIM, weight, mask=live)
    tl.store(pointers + HEAD_DIM + 1, top, mask=live)


@triton.jit
def _join(
    parts, value_scales, out, decodes, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    DIM: tl.constexpr, TOGETHER: tl.constexpr, ORDERED: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Add the chunks of one head of one decode; nothing to do if it has one. ``TOGETHER`` of them are loaded at once.

    ``ORDERED``: from left to right, as one program for all chunks does it; else in any order that depends on nothing
    but their number, without one waiting for the other.
    """
    release(WAITS)
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    owner = tl.program_id(1)
    row = tl.load(decodes + owner * 5).to(tl.int64)
    seen = tl.load(decodes + owner * 5 + 1)
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW)
    chunk = tl.load(decodes + owner * 5 + 3)
    if seen <= chunk:
        wait(WAITS)
        return
    count = tl.cdiv(seen, chunk)
    place = parts + (tl.load(decodes + owner * 5 + 4).to(tl.int64) * num_heads + head) * (HEAD_DIM + 2)
    dims = tl.arange(0, DIM)
    one = tl.arange(0, 1)
    total = tl.zeros([1, DIM], tl.float32)
    total_weight = tl.zeros([1], tl.float32)
    total_top = tl.full([1], float("-inf"), tl.float32)
    AT_ONCE: tl.constexpr = 1 if ORDERED else TOGETHER
    numbers = tl.arange(0, AT_ONCE)
    wait(WAITS)
    for start in range(0, count, TOGETHER):
        # unrolled, so that the loads of several chunks are under way at once; adding an empty chunk changes nothing
        for ahead in tl.static_range(0, TOGETHER, AT_ONCE):
            live = numbers + start + ahead < count
            at = place + (numbers + start + ahead).to(tl.int64) * num_heads * (HEAD_DIM + 2)
            mixed = tl.load(at[:, None] + dims[None, :], mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            weight = tl.load(at + HEAD_DIM, mask=live, other=0.0)
            top = tl.load(at + HEAD_DIM + 1, mask=live, other=float("-inf"))
            if not ORDERED:
                highest = tl.max(top, 0)
                fade = tl.exp2(top - highest)
                mixed = tl.sum(mixed * fade[:, None], 0)[None, :]
                weight = tl.sum(weight * fade, 0) + tl.zeros([1], tl.float32)
                top = highest + tl.zeros([1], tl.float32)
            total, total_weight, total_top = _add(total, total_weight, total_top, mixed, weight, top)
    pointers = out + (row * num_heads + head + one[:, None]) * HEAD_DIM + dims[None, :]
    result = total / total_weight[:, None]
    if value_scales is not None:
        result *= tl.load(value_scales + head // GROUP)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])


@triton.jit
def _prefill(
    query, keys, values, key_scales, value_scales, out, pieces, tables, factor, cap, row_stride, query_head_stride,
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

    if key_scales is not None:
        factor *= tl.load(key_scales + kv_head)
    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    q_offsets = (row + lanes) * row_stride + head * query_head_stride
    q = _load(query, q_offsets, lanes < size, query.dtype.element_ty, HEAD_DIM, DIM, True)
    mixed = tl.zeros([BLOCK_M, DIM], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    stop = position + size
    begin = 0
    common = (position + 1) // BLOCK_N * BLOCK_N  # every row sees all of [begin, common)
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        common = begin
    ONE: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    blocks = _look_up(table, begin, stop, BLOCK_SIZE, BLOCK_N, ONE)
    for start in range(begin, common, BLOCK_N):
        live = start + tl.arange(0, BLOCK_N) < stop
        origin, rows = _find(blocks, start, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, BLOCK_N, ONE)
        blocks = _look_up(table, start + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N, ONE)
        k = _load(keys + origin, rows, live, q.dtype, HEAD_DIM, DIM, False)
        v = _load(values + origin, rows, live, q.dtype, HEAD_DIM, DIM, False)
        mixed, weight, top = _update(q, k, v, live[None, :], mixed, weight, top, factor, cap, False)
    for start in range(common, stop, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        live = places < stop
        origin, rows = _find(blocks, start, kv_head, block_stride, slot_stride, head_stride, BLOCK_SIZE, BLOCK_N, ONE)
        blocks = _look_up(table, start + BLOCK_N, stop, BLOCK_SIZE, BLOCK_N, ONE)
        k = _load(keys + origin, rows, live, q.dtype, HEAD_DIM, DIM, True)
        v = _load(values + origin, rows, live, q.dtype, HEAD_DIM, DIM, True)
        ages = (position + lanes)[:, None] - places[None, :]  # how far back each key lies
        seen = ages >= 0
        if WINDOW > 0:
            seen = seen & (ages < WINDOW)
        mixed, weight, top = _update(q, k, v, seen, mixed, weight, top, factor, cap, True)
    pointers = out + ((row + lanes)[:, None] * num_heads + head) * HEAD_DIM + dims[None, :]
    mask = (lanes < size)[:, None] & (dims < HEAD_DIM)[None, :]
    weight = tl.where(lanes < size, weight, 1.0)
    result = mixed / weight[:, None]
    if value_scales is not None:
        result *= tl.load(value_scales + kv_head)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)


LOG2_E = 1.4426950408889634


class Fresh(NamedTuple):
    """What queries, keys and values out of the projection still lack; nothing at all: they lack nothing."""

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None


def _widths(query, keys, scale, softcap, window):
    """Return the arguments that all kernels share: positional ones and keywords."""
    assert query.stride(2) == keys.stride(3) == 1
    head_dim = keys.shape[3]
    factors = (scale * LOG2_E, None) if softcap is None else (2 * scale / softcap * LOG2_E, softcap * LOG2_E)
    numbers = (*factors, *query.stride()[:2], *keys.stride()[:3])
    widths = {
        "GROUP": query.shape[1] // keys.shape[2],
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": keys.shape[1],
        "WINDOW": window or 0,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "enable_fp_fusion": False,  # multiply-adds are written out: the same bits in every loop
    }
    return numbers, widths


def sum_shared(
    query: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, parts: Tensor, decodes: Tensor,
    shared: Tensor, tables: Tensor, scale: float, softcap: float | None, members: int, rows: int,
    block_n: int, warps: int, stages: int,
    registers: int | None = None,
) -> None:  # fmt: skip
    """Put the sums of chunks that up to ``members`` decodes have in common into the rows of ``parts`` of each.

    ``rows``: most queries that a program multiplies at once; ``registers`` as for decodes.
    """
    assert keys.stride() == values.stride()
    numbers, widths = _widths(query, keys, scale, softcap, None)
    del widths["WINDOW"]
    most = members * widths["GROUP"]
    rows = min(rows, max(16, triton.next_power_of_2(most)))
    _shared[triton.cdiv(most, rows), keys.shape[2], shared.shape[0]](
        query, keys, values, key_scales, parts, decodes, shared, tables, *numbers, **widths, BLOCK_M=rows,
        BLOCK_N=block_n, num_warps=warps, num_stages=stages, maxnreg=registers, **launch_options(query),
    )  # fmt: skip


def decode(
    query: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, fresh: Fresh,
    out: Tensor, parts: Tensor | None, decodes: Tensor, owners: Tensor, rest: Tensor | None, tables: Tensor,
    scale: float, softcap: float | None, window: int | None, ahead: int, ordered: bool, block_n: int, warps: int,
    stages: int,
    registers: int | None = None,
) -> None:  # fmt: skip
    """Attend spans of one token: each chunk by a program of its own, with a row of ``parts`` for its sums; or uncut.

    ``fresh``: what ``query``, which then has keys and values too, still lacks. ``ahead``: tokens, a power of 2, whose
    keys and values each program asks for early. ``ordered``: add parts from left to right, which gives the same bits
    whether contexts are cut or not, and is faster while they are few.
    ``rest``: the chunks that are left to do, if ``parts`` has the sums of some already; None: all of them.
    ``registers``: most that a thread may have, so that a processor takes more programs; None: as the compiler likes.
    """
    assert keys.stride() == values.stride()
    numbers, widths = _widths(query, keys, scale, softcap, window)
    split = 0 if parts is None else 1 if rest is None else 2
    programs = (decodes, owners, rest)[split].shape[0]
    angle_stride = 0 if fresh.cos is None else fresh.cos.stride(0)
    rows = widths["GROUP"] + (0 if fresh.cos is None else 2)
    if programs:
        _decode[keys.shape[2], programs](
            query, keys, values, key_scales, value_scales, *fresh, out, parts if split else out, decodes, owners,
            owners if rest is None else rest, tables, split, *numbers[:4], angle_stride, *numbers[4:], **widths,
            ROWS=max(16, triton.next_power_of_2(rows)), BLOCK_N=block_n, AHEAD=ahead,
            NATIVE=query.is_cuda and torch.version.hip is None, num_warps=warps, num_stages=stages,
            maxnreg=registers, **launch_options(query),
        )  # fmt: skip
    if split:
        names = ("GROUP", "HEAD_DIM", "WINDOW", "DIM", "enable_fp_fusion")
        _join[query.shape[1], decodes.shape[0]](
            parts, value_scales, out, decodes, **{name: widths[name] for name in names},
            TOGETHER=8 if ordered else 64, ORDERED=ordered, num_warps=1 if ordered else 4, **launch_options(query),
        )  # fmt: skip


def prefill(
    query: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None, out: Tensor,
    pieces: Tensor, tables: Tensor, scale: float, softcap: float | None, window: int | None, block_m: int, block_n: int,
    warps: int,
    stages: int, registers: int | None = None,
) -> None:  # fmt: skip
    """Attend spans of several tokens, cut into ``pieces`` of at most ``block_m``; ``registers`` as for decodes."""
    assert keys.stride() == values.stride()
    numbers, widths = _widths(query, keys, scale, softcap, window)
    _prefill[query.shape[1], pieces.shape[0]](
        query, keys, values, key_scales, value_scales, out, pieces, tables, *numbers, **widths,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, maxnreg=registers,
    )  # fmt: skip

"""One program treats a few heads of one token: query heads, key heads or value heads, never two kinds.

A head is read as two halves, so that a thread holds both numbers of each pair that the rotation mixes. All that a
program needs is asked for at once, in tiles of one shape: what is asked for behind a sum waits for what the sum needs,
and what has another shape changes hands.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED
from nanovllm.ops.overlap import launch_options, release, wait

FEW_TOKENS = 64
"""Up to here a step is too small to fill a large GPU, and programs of one warp start soonest."""


@triton.jit
def _load(row, column, inside, HALF: tl.constexpr):
    """Load both halves of a row, or of one that all heads share."""
    return tl.load(row + column, inside, 0.0), tl.load(row + HALF + column, inside, 0.0)


@triton.jit
def _turned(row, norm, cos, sin, column, inside, half, eps, HEAD_DIM: tl.constexpr):
    """Return both halves of heads, normalised, if there is a norm, and turned; rounded where the reference rounds."""
    HALF: tl.constexpr = HEAD_DIM // 2
    one, two = _load(row, column, inside, HALF)
    cos, other_cos = _load(cos, column, half, HALF)
    sin, other_sin = _load(sin, column, half, HALF)
    x, y = one.to(tl.float32), two.to(tl.float32)
    if norm is not None:
        gain, other_gain = _load(norm, column, half, HALF)
        scale = tl.rsqrt((tl.sum(x * x, 1, keep_dims=True) + tl.sum(y * y, 1, keep_dims=True)) / HEAD_DIM + eps)
        x, y = (x * scale).to(one.dtype).to(tl.float32), (y * scale).to(one.dtype).to(tl.float32)
        x, y = (x * gain.to(tl.float32)).to(one.dtype), (y * other_gain.to(tl.float32)).to(one.dtype)
        x, y = x.to(tl.float32), y.to(tl.float32)
    first = (x * cos.to(tl.float32)).to(one.dtype).to(tl.float32) + y * sin.to(tl.float32)
    second = (y * other_cos.to(tl.float32)).to(one.dtype).to(tl.float32) + x * other_sin.to(tl.float32)
    return first.to(one.dtype), second.to(one.dtype)


@triton.jit
def _store(cache, cache_head, scales, slot, one, two, head, column, live, half, HALF: tl.constexpr):
    """Write both halves of live heads to a slot of a cache, if it is not -1; divided by scales, if there are any."""
    if scales is not None:
        scale = tl.load(scales + head, live, 1.0)
        one = _narrow(one, scale, cache.dtype.element_ty)
        two = _narrow(two, scale, cache.dtype.element_ty)
    if slot >= 0:
        pointers = cache + head * cache_head + column
        tl.store(pointers, one, live & half)
        tl.store(pointers + HALF, two, live & half)


@triton.jit
def _narrow(x, scale, dtype: tl.constexpr):
    """Return x / scale as float8; what is too large becomes the largest number."""
    x = tl.div_rn(x.to(tl.float32), scale)
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def rotate_and_store_kernel(
    qkv, q_norm, k_norm, eps, cos, sin, keys, values, slot_mapping, key_scales, value_scales, out,
    qkv_token, qkv_head, cos_token, sin_token, keys_slot, keys_head, values_slot, values_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """Treat ROWS heads of one token. Its groups of query heads come first, then its keys', then its values'."""
    release(WAITS)
    HALF: tl.constexpr = HEAD_DIM // 2
    KEYS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    VALUES: tl.constexpr = KEYS + (KV_HEADS + ROWS - 1) // ROWS
    GROUPS: tl.constexpr = 2 * VALUES - KEYS
    token = (tl.program_id(0) // GROUPS).to(tl.int64)  # int64: slot * keys_slot passes 2**31 in a cache of 4 GiB
    group = tl.program_id(0) % GROUPS
    slot = tl.load(slot_mapping + token)
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    half = column < HALF
    row = tl.arange(0, ROWS)[:, None]
    qkv += token * qkv_token
    cos += token * cos_token
    sin += token * sin_token
    wait(WAITS)
    if group < KEYS:
        head = group * ROWS + row
        inside = (head < HEADS) & half
        one, two = _turned(qkv + head * qkv_head, q_norm, cos, sin, column, inside, half, eps, HEAD_DIM)
        pointers = out + (token * HEADS + head) * HEAD_DIM + column
        tl.store(pointers, one, inside)
        tl.store(pointers + HALF, two, inside)
    elif group < VALUES:
        head = (group - KEYS) * ROWS + row
        live = head < KV_HEADS
        one, two = _turned(qkv + (HEADS + head) * qkv_head, k_norm, cos, sin, column, live & half, half, eps, HEAD_DIM)
        _store(keys + slot * keys_slot, keys_head, key_scales, slot, one, two, head, column, live, half, HALF)
    else:
        head = (group - VALUES) * ROWS + row
        live = head < KV_HEADS
        one, two = _load(qkv + (HEADS + KV_HEADS + head) * qkv_head, column, live & half, HALF)
        _store(values + slot * values_slot, values_head, value_scales, slot, one, two, head, column, live, half, HALF)


def rotate_and_store(
    qkv: Tensor, norms: tuple[Tensor, Tensor, float] | None, cos: Tensor, sin: Tensor,
    keys: Tensor, values: Tensor, slot_mapping: Tensor,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.rotate_and_store``. Channels must lie side by side."""
    kv_heads, (tokens, all_heads, head_dim) = keys.shape[1], qkv.shape
    heads = all_heads - 2 * kv_heads
    out = torch.empty_like(qkv[:, :heads], memory_format=torch.contiguous_format)
    if not tokens:
        return out
    block = max(2, triton.next_power_of_2(head_dim // 2))
    few = tokens <= FEW_TOKENS
    rows = max(1, (256 if few else 512) // block)  # a warp takes 256 pairs: 8 of each half a thread, 16 bytes
    groups = triton.cdiv(heads, rows) + 2 * triton.cdiv(kv_heads, rows)
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    rotate_and_store_kernel[(tokens * groups,)](
        qkv, q_weight, k_weight, eps, cos, sin, keys, values, slot_mapping, key_scales, value_scales, out,
        qkv.stride(0), qkv.stride(1), cos.stride(0), sin.stride(0),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, ROWS=rows, BLOCK=block,
        num_warps=1 if few else 2, **FUSED, **launch_options(qkv),
    )  # fmt: skip
    return out

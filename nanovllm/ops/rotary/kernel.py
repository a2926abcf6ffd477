"""Rotary position embedding: each number is read beside its partner, so one pass does the turn."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED


@triton.jit(do_not_specialize=["rows"])  # it changes with each step: nothing should be compiled for it
def rotate_kernel(
    x, cos, sin, out, rows, heads, head_dim, x_token, x_head, cos_token, sin_token,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn ``ROWS`` rows; row = token * heads + head."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # int64: a long prompt passes 2**31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < head_dim)
    half = head_dim // 2
    partner = tl.where(column < half, column + half, column - half)
    token = row // heads
    head = x + token * x_token + row % heads * x_head
    own = tl.load(head + column, inside, 0.0).to(tl.float32)
    other = tl.load(head + partner, inside, 0.0).to(tl.float32)
    cosine = tl.load(cos + token * cos_token + column, inside, 0.0).to(tl.float32)
    sine = tl.load(sin + token * sin_token + column, inside, 0.0).to(tl.float32)
    first = (own * cosine).to(out.dtype.element_ty).to(tl.float32)  # the reference rounds here too
    tl.store(out + row * head_dim + column, (first + other * sine).to(out.dtype.element_ty), inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``reference.rotate``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, heads, head_dim = x.shape
    rows, block = tokens * heads, triton.next_power_of_2(head_dim)
    if not rows:
        return out
    together = max(1, 1024 // block)
    rotate_kernel[(triton.cdiv(rows, together),)](
        x, cos, sin, out, rows, heads, head_dim, x.stride(0), x.stride(1), cos.stride(0), sin.stride(0),
        ROWS=together, BLOCK=block, num_warps=4, **FUSED,
    )  # fmt: skip
    return out

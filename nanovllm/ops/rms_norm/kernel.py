"""RMS normalisation in one pass over its input, with or without the addition in front of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED
from nanovllm.ops.overlap import launch_options, release, wait

WIDEST = 16384
"""A program holds whole rows in registers: 16 warps with 32 numbers a thread."""


@triton.jit(do_not_specialize=["rows"])  # it changes with each step: nothing should be compiled for it
def rms_norm_kernel(
    x, residual, weight, out, total, rows, heads, width, x_token, x_head, x_part, residual_token, eps,
    ADD: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Normalise ``ROWS`` rows; row = token * heads + head. ``ADD``: add the residual first and store the sum.

    ``x`` comes in ``PARTS``, which are added from the first to the last.
    """
    release(WAITS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # int64: rows * width passes 2**31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    gain = tl.load(weight + column, column < width, 0.0).to(tl.float32)  # [1, BLOCK]
    wait(WAITS)
    x += row // heads * x_token + row % heads * x_head + column
    values = tl.load(x, inside, 0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        values += tl.load(x + part * x_part, inside, 0.0)
    if ADD:
        values += tl.load(residual + row * residual_token + column, inside, 0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, inside)
        values = rounded.to(tl.float32)  # what is normalised is the sum that the next block will read
    scale = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / width + eps)  # [ROWS, 1]
    normed = (values * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (normed * gain).to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``. Takes [tokens, width] or [tokens, heads, width], at most ``WIDEST`` wide."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``."""
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    _launch(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, add: bool) -> None:
    parts = x.shape[0] if add and x.dim() == 3 else 1
    heads = x.shape[1] if not add and x.dim() == 3 else 1
    width = x.shape[-1]
    rows = out.numel() // max(width, 1)
    if not rows:
        return
    block = triton.next_power_of_2(width)
    together = max(1, 1024 // block)  # heads are short: several of them keep a program's threads busy
    token = x.stride(-2) if add else x.stride(0)
    rms_norm_kernel[(triton.cdiv(rows, together),)](
        x, residual, weight, out, total, rows, heads, width, token, x.stride(-2), x.stride(0), residual.stride(0), eps,
        ADD=add, PARTS=parts, ROWS=together, BLOCK=block,
        num_warps=min(16, max(1, together * block // 256)),  # 8 numbers a thread: one load of 16 bytes
        **launch_options(x), **FUSED,
    )  # fmt: skip

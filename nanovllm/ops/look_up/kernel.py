"""Rows of a table in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.overlap import launch_options, release, wait

MOST = 4096
"""Numbers that a program copies."""


@triton.jit
def look_up_kernel(table, indices, out, width, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    """Copy ``BLOCK`` numbers of one row."""
    release(WAITS)
    wait(WAITS)
    row = tl.program_id(0).to(tl.int64)  # int64: row * width passes 2**31
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(table + tl.load(indices + row) * width + column, column < width)
    tl.store(out + row * width + column, found, column < width)


def look_up(table: Tensor, indices: Tensor) -> Tensor:
    """See ``reference.look_up``. The table is contiguous."""
    rows, shape = indices.shape[0], table.shape[1:]
    out = torch.empty((rows, *shape), dtype=table.dtype, device=table.device)
    width = shape.numel()
    if rows and width:
        block = min(MOST, triton.next_power_of_2(width))
        look_up_kernel[rows, triton.cdiv(width, block)](
            table, indices, out, width, BLOCK=block, num_warps=max(1, min(8, block // 256)), **launch_options(table)
        )
    return out

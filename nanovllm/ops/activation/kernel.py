"""Gated activations in one pass over the packed projection."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED
from nanovllm.ops.overlap import launch_options, release, wait


@triton.jit
def gate_times_up_kernel(
    gate_up, out, width, gate_up_token, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, WAITS: tl.constexpr
):
    """Compute ``BLOCK`` columns of one row."""
    release(WAITS)
    wait(WAITS)
    row = tl.program_id(0).to(tl.int64)  # int64: row * width passes 2**31
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * gate_up_token + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_token + width + column, inside, 0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))  # 1 / sqrt(2)
    else:  # "gelu_pytorch_tanh", with (1 + tanh(t)) / 2 = 1 / (1 + exp(-2 t)) and 2 sqrt(2 / pi) = 1.5957...
        active = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    rounded = active.to(out.dtype.element_ty).to(tl.float32)  # the reference rounds here too
    tl.store(out + row * width + column, (rounded * up).to(out.dtype.element_ty), inside)


def gate_times_up(gate_up: Tensor, activation: str) -> Tensor:
    """See ``reference.gate_times_up``."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty_like(gate_up[:, :width], memory_format=torch.contiguous_format)
    if not tokens:
        return out
    block = min(1024, triton.next_power_of_2(width))
    gate_times_up_kernel[(tokens, triton.cdiv(width, block))](
        gate_up, out, width, gate_up.stride(0), ACTIVATION=activation, BLOCK=block, num_warps=4,
        **launch_options(gate_up), **FUSED,
    )  # fmt: skip
    return out

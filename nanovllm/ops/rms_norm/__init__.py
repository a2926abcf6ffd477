"""RMS normalisation, alone and behind the addition of a residual."""

import torch
from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.rms_norm import reference
from nanovllm.ops.rms_norm.reference import whole

__all__ = ["add_rms_norm", "rms_norm", "whole"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``. In float32, what it says in the fewest calls: each costs some microseconds."""
    if weight.dim() == 1 and x.dim() in (2, 3) and kernels_run_on(x, weight):
        from nanovllm.ops.rms_norm import kernel

        if x.shape[-1] <= kernel.WIDEST:
            return kernel.rms_norm(x, weight, eps)
    if x.dtype is torch.float32:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.full_like(length, eps).addcmul_(length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``."""
    if kernels_run_on(residual, weight) and x.is_cuda and x.stride(-1) == 1:
        from nanovllm.ops.rms_norm import kernel

        if x.shape[-1] <= kernel.WIDEST:
            return kernel.add_rms_norm(x, residual, weight, eps)
    total = whole(x, residual.dtype) + residual
    return rms_norm(total, weight, eps), total

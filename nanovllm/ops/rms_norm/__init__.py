"""RMS normalisation, alone and behind the addition of a residual."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.rms_norm import reference

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``. In float32 PyTorch's own does the same in one call instead of seven."""
    if x.dtype is torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``."""
    total = x + residual
    return rms_norm(total, weight, eps), total

"""Rotary position embedding."""

from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.rotary import reference

__all__ = ["rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``reference.rotate``."""
    if kernels_run_on(x, cos, sin):
        from nanovllm.ops.rotary import kernel

        return kernel.rotate(x, cos, sin)
    return reference.rotate(x, cos, sin)

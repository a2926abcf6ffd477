"""Rows of a table: the vectors of tokens, the angles of positions."""

from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.look_up import reference

__all__ = ["look_up"]


def look_up(table: Tensor, indices: Tensor) -> Tensor:
    """See ``reference.look_up``. On a GPU one kernel that starts early: PyTorch's takes 6 us for a few rows."""
    if kernels_run_on(table) and table.is_contiguous():
        from nanovllm.ops.look_up import kernel

        return kernel.look_up(table, indices)
    return reference.look_up(table, indices)

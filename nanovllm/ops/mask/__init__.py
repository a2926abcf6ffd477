"""Forbid tokens: packed masks onto rows of logits."""

from torch import Tensor

from nanovllm.ops.kernels import TRITON
from nanovllm.ops.mask import reference

__all__ = ["mask_logits"]


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See ``reference.mask_logits``. The kernel reads masks and writes what is forbidden, and nothing else."""
    if TRITON and logits.is_cuda:
        from nanovllm.ops.mask import kernel

        return kernel.mask_logits(logits, rows, words)
    return reference.mask_logits(logits, rows, words)

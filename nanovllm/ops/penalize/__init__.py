"""Making tokens that a request already holds less likely, or more."""

from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.penalize import reference

__all__ = ["penalize"]


def penalize(logits: Tensor, rows: Tensor, words: Tensor, edges: Tensor, pending: Tensor, strengths: Tensor) -> None:
    """See ``reference.penalize``."""
    if kernels_run_on(logits):
        from nanovllm.ops.penalize import kernel

        kernel.penalize(logits, rows, words, edges, pending, strengths)
    else:
        reference.penalize(logits, rows, words, edges, pending, strengths)

"""Drawing the next token of each row."""

from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.sample import reference
from nanovllm.ops.sample.reference import keep_top_k, keep_top_p

__all__ = ["draw", "greedy", "keep_top_k", "keep_top_p"]


def greedy(logits: Tensor) -> Tensor:
    """See ``reference.greedy``."""
    if kernels_run_on(logits):
        from nanovllm.ops.sample import kernel

        return kernel.greedy(logits)
    return reference.greedy(logits)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See ``reference.draw``."""
    if kernels_run_on(logits):
        from nanovllm.ops.sample import kernel

        return kernel.draw(logits, seeds, positions)
    return reference.draw(logits, seeds, positions)

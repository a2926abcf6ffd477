"""Choosing the next token of each row, and what the model thought of it."""

from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.sample import reference

__all__ = ["MOST_LOGPROBS", "choose", "draw", "greedy", "log_probs", "processed"]

MOST_LOGPROBS = 32
"""Of a row, that the kernel finds: each is a search of its own through the logits in registers. More are left to the
reference, whose last bits are others."""


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


def choose(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, *, filtered: bool,
) -> Tensor:  # fmt: skip
    """See ``reference.choose``. Where kernels run, nothing waits for the host: a CUDA graph can hold it."""
    if kernels_run_on(logits):
        from nanovllm.ops.sample import kernel

        return kernel.choose(logits, temperatures, top_k, top_p, min_p, seeds, positions, filtered=filtered)
    return reference.choose(logits, temperatures, top_k, top_p, min_p, seeds, positions, filtered=filtered)


def log_probs(
    logits: Tensor, tokens: Tensor, number: int, given: Tensor | None = None, *, normalized: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.log_probs``."""
    if kernels_run_on(logits):
        from nanovllm.ops.sample import kernel

        if number <= MOST_LOGPROBS:
            return kernel.log_probs(logits, tokens, number, given, normalized=normalized)
    return reference.log_probs(logits, tokens, number, given, normalized=normalized)


def processed(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See ``reference.processed``."""
    return reference.processed(logits, temperatures, top_k, top_p, min_p)

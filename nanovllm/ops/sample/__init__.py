"""Drawing the next token of each row."""

from nanovllm.ops.sample.reference import draw, greedy, keep_top_k, keep_top_p

__all__ = ["draw", "greedy", "keep_top_k", "keep_top_p"]

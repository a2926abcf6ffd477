"""Numbers that quantised checkpoints carry beside their weights: the scales of a float8 cache."""

from nanovllm.quantization.cache_scales import cache_scales

__all__ = ["cache_scales"]

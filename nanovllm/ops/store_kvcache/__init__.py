"""Store a step's keys and values in the cache."""

from nanovllm.ops.store_kvcache.reference import store_kvcache

__all__ = ["store_kvcache"]

"""Store a step's keys and values in the cache."""

from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.store_kvcache import reference

__all__ = ["store_kvcache"]


def store_kvcache(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.store_kvcache``."""
    if kernels_run_on(key, value, keys, values):
        from nanovllm.ops.store_kvcache import kernel

        kernel.store_kvcache(key, value, keys, values, slot_mapping)
    elif key.device.type == "cpu":  # where no step is padded: what the reference says in two calls
        keys.index_copy_(0, slot_mapping, key)
        values.index_copy_(0, slot_mapping, value)
    else:
        reference.store_kvcache(key, value, keys, values, slot_mapping)

"""One program copies the keys and values of one token to its slot."""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED


@triton.jit
def store_kvcache_kernel(
    key, value, keys, values, slot_mapping, kv_heads, head_dim,
    key_token, key_head, value_token, value_head, keys_slot, keys_head, values_slot, values_head,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one token's key and value, of all heads, if its slot is not -1."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)  # int64: slot * keys_slot passes 2**31 in a cache of 4 GiB
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < kv_heads) & (column < head_dim)
    if slot >= 0:
        new = tl.load(key + token * key_token + head * key_head + column, inside)
        tl.store(keys + slot * keys_slot + head * keys_head + column, new, inside)
        new = tl.load(value + token * value_token + head * value_head + column, inside)
        tl.store(values + slot * values_slot + head * values_head + column, new, inside)


def store_kvcache(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """See ``reference.store_kvcache``."""
    tokens, kv_heads, head_dim = key.shape
    if not tokens:
        return
    store_kvcache_kernel[(tokens,)](
        key, value, keys, values, slot_mapping, kv_heads, head_dim,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=triton.next_power_of_2(kv_heads), BLOCK=triton.next_power_of_2(head_dim), num_warps=4,
        **FUSED,
    )  # fmt: skip

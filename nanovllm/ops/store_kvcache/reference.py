"""Write new keys and values where the block table says."""

from jaxtyping import Float, Int64
from torch import Tensor


def store_kvcache(
    key: Float[Tensor, "tokens kv_heads head_dim"],
    value: Float[Tensor, "tokens kv_heads head_dim"],
    keys: Float[Tensor, "slots kv_heads head_dim"],
    values: Float[Tensor, "slots kv_heads head_dim"],
    slot_mapping: Int64[Tensor, " tokens"],
) -> None:
    """Copy row i of ``key`` and ``value`` to row ``slot_mapping[i]`` of ``keys`` and ``values``, in place.

    A slot is ``block * block_size + offset``. Each slot occurs at most once; -1 marks a row of padding, which is
    not copied.
    """
    written = slot_mapping >= 0
    if not written.all():
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    keys.index_copy_(0, slot_mapping, key)
    values.index_copy_(0, slot_mapping, value)

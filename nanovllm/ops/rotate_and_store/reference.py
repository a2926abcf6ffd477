"""What lies between the projection to queries, keys and values and attention: normalise, rotate, store."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nanovllm.ops.rms_norm.reference import rms_norm
from nanovllm.ops.rotary.reference import rotate
from nanovllm.ops.store_kvcache.reference import store_kvcache

FLOAT8_MAX = 448.0
"""The largest number of float8_e4m3fn."""


def rotate_and_store(
    qkv: Float[Tensor, "tokens heads_and_twice_kv_heads head_dim"],
    norms: tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"], float] | None,
    cos: Float[Tensor, "tokens 1 head_dim"],
    sin: Float[Tensor, "tokens 1 head_dim"],
    keys: Float[Tensor, "slots kv_heads head_dim"],
    values: Float[Tensor, "slots kv_heads head_dim"],
    slot_mapping: Int64[Tensor, " tokens"],
    key_scales: Float[Tensor, " kv_heads"] | None = None,
    value_scales: Float[Tensor, " kv_heads"] | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Return the queries, normalised and rotated; write the keys, treated alike, and the values to their slots.

    ``qkv`` holds a token's query heads, then its key heads, then its value heads; ``norms`` the weight of queries, that
    of keys, and eps, or None: heads are not normalised. Each step rounds as if it stood alone: ``rms_norm``, then
    ``rotate``, then ``store_kvcache``.

    With scales the cache is float8_e4m3fn: what is stored is ``quantize`` of the rounded keys and values.
    """
    kv_heads = keys.shape[1]
    q, k, v = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]
    if norms is not None:
        q, k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if key_scales is None or value_scales is None:
        store_kvcache(k, v, keys, values, slot_mapping)
    else:
        written = slot_mapping >= 0
        for cache, new, scales in ((keys, k, key_scales), (values, v, value_scales)):
            # as bytes: PyTorch does not write float8 by index
            cache.view(torch.uint8)[slot_mapping[written]] = quantize(new, scales).view(torch.uint8)[written]
    return q.contiguous()


def quantize(
    x: Float[Tensor, "tokens kv_heads head_dim"], scales: Float[Tensor, " kv_heads"]
) -> Float[Tensor, "tokens kv_heads head_dim"]:
    """Divide each head by its scale and round to float8_e4m3fn; what is too large becomes the largest number."""
    return (x.float() / scales[:, None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)

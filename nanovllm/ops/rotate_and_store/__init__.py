"""Normalise and rotate queries and keys, and store keys and values: one launch between projection and attention."""

from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.rms_norm import rms_norm
from nanovllm.ops.rotary import rotate
from nanovllm.ops.store_kvcache import store_kvcache

__all__ = ["rotate_and_store"]


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """See ``reference.rotate_and_store``.

    Where the kernel does not run, scales are refused, the steps are calls of their own, as few as there can be, and
    the rows of what is returned may lie apart.
    """
    if kernels_run_on(qkv, cos, sin):
        from nanovllm.ops.rotate_and_store import kernel

        return kernel.rotate_and_store(qkv, norms, cos, sin, keys, values, slot_mapping, key_scales, value_scales)
    assert key_scales is None and value_scales is None, "a cache of float8 needs the kernel"
    kv_heads = keys.shape[1]
    qk, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
    heads = qk.shape[1] - kv_heads
    if norms is not None:
        q_weight, k_weight, eps = norms
        q = rotate(rms_norm(qk[:, :heads], q_weight, eps), cos, sin)
        k = rotate(rms_norm(qk[:, heads:], k_weight, eps), cos, sin)
    else:
        qk = rotate(qk, cos, sin)
        q, k = qk[:, :heads], qk[:, heads:]
    store_kvcache(k, v, keys, values, slot_mapping)
    return q

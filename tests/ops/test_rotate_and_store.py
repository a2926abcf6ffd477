"""Normalise, rotate, store: the reference against its parts, and the front door against the reference."""

import pytest
import torch

from nanovllm.ops.rms_norm.reference import rms_norm
from nanovllm.ops.rotary.reference import rotate
from nanovllm.ops.rotate_and_store import reference, rotate_and_store
from nanovllm.ops.rotate_and_store.reference import quantize

EPS = 1e-6


def draw(tokens, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32):
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    turns = torch.rand(tokens, 1, head_dim // 2) * 100
    cos, sin = (torch.cat(halves, -1).to(dtype) for halves in ([turns.cos()] * 2, (-turns.sin(), turns.sin())))
    norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), EPS)
    caches = torch.full((2, 2 * tokens + 3, kv_heads, head_dim), torch.nan).to(dtype)
    return qkv, norms, cos, sin, caches, torch.randperm(2 * tokens + 3)[:tokens]


@pytest.mark.parametrize("normed", [True, False])
def test_it_is_a_norm_a_rotation_and_a_store(normed):
    qkv, norms, cos, sin, (keys, values), slots = draw(5)
    q = reference.rotate_and_store(qkv, norms if normed else None, cos, sin, keys, values, slots)
    expected = (
        rotate(rms_norm(x, weight, EPS) if normed else x, cos, sin)
        for x, weight in ((qkv[:, :4], norms[0]), (qkv[:, 4:6], norms[1]))
    )
    assert torch.equal(q, next(expected)) and torch.equal(keys[slots], next(expected))
    assert torch.equal(values[slots], qkv[:, 6:])
    assert int((~keys.isnan()).sum()) == int((~values.isnan()).sum()) == 5 * 2 * 16


def test_padding_writes_nothing_to_the_cache():
    qkv, norms, cos, sin, (keys, values), slots = draw(3)
    slots[1] = -1
    q = reference.rotate_and_store(qkv, norms, cos, sin, keys, values, slots)
    assert not q.isnan().any()
    assert int((~keys.isnan()).sum()) == int((~values.isnan()).sum()) == 2 * 2 * 16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("normed", [True, False])
def test_the_front_door_on_a_cpu(normed, tokens, dtype):
    qkv, norms, cos, sin, caches, slots = draw(tokens, dtype=dtype)
    norms = norms if normed else None
    expected = caches.clone()
    q = rotate_and_store(qkv, norms, cos, sin, *caches, slots)
    # in float32 the front door finds the root of the mean in another way
    bound = 2e-6 if dtype is torch.float32 else 0
    wanted = reference.rotate_and_store(qkv, norms, cos, sin, *expected, slots)
    torch.testing.assert_close(q, wanted, rtol=bound, atol=bound)
    torch.testing.assert_close(caches, expected, rtol=bound, atol=bound, equal_nan=True)


def test_float8_by_hand():
    x = torch.tensor([[[1.0, -1.06, 0.001, 300.0, 1e4, -1e9]]])
    stored = quantize(x, torch.tensor([0.5]))
    # of 1 + 1/8 steps: 2.12 is nearest to 2.0; the smallest step is 2^-9; 600 and above become 448
    assert stored.float().tolist() == [[[2.0, -2.0, 2.0**-9, 448.0, 448.0, -448.0]]]
    assert quantize(torch.full((1, 1, 1), torch.nan), torch.ones(1)).isnan().all(), "a fault is not hidden"


def test_a_cache_of_float8_is_written_in_parts():
    qkv, norms, cos, sin, (keys, values), slots = draw(4)
    narrow = torch.zeros(2, *keys.shape).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 0.1], [2.0, 0.1]])
    slots[2] = -1
    q = reference.rotate_and_store(qkv, norms, cos, sin, *narrow, slots, *scales)
    assert torch.equal(q, reference.rotate_and_store(qkv, norms, cos, sin, keys, values, slots))
    for wide, cache, scale in zip((keys, values), narrow, scales, strict=True):
        kept = slots[[0, 1, 3]]
        error = (cache.float()[kept] * scale[:, None] - wide[kept]).abs()
        assert (error <= wide[kept].abs() / 16 + scale[:, None] / 1024).all()  # half a step of three bits
        assert cache.float().count_nonzero() <= 3 * 2 * 16
    with pytest.raises(AssertionError, match="needs the kernel"):
        rotate_and_store(qkv, norms, cos, sin, *narrow, slots, *scales)

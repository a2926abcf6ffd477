"""The kernel that stores keys and values means what its reference says, bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.ops.store_kvcache import kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("tokens", "slots", "kv_heads", "head_dim"),
    [(0, 4, 1, 8), (1, 1, 1, 1), (1, 9, 3, 16), (7, 12, 2, 80), (9, 16, 8, 128)],
)
def test_writes_each_slot_and_no_other(tokens, slots, kv_heads, head_dim, padding, dtype):
    rows = tokens + padding
    qkv = torch.randn(rows, 2 * kv_heads + 1, head_dim, device=DEVICE).to(dtype)
    key, value = qkv[:, 1 : kv_heads + 1], qkv[:, kv_heads + 1 :]
    mapping = torch.cat((torch.randperm(slots)[:tokens], torch.full((padding,), -1)))[torch.randperm(rows)].to(DEVICE)
    caches = torch.full((2, slots, kv_heads + 1, head_dim + 2), torch.nan, device=DEVICE, dtype=dtype)
    expected = caches.clone()
    for store, (keys, values) in ((kernel, caches), (reference, expected)):
        store.store_kvcache(key, value, keys[:, 1:, :head_dim], values[:, 1:, :head_dim], mapping)
    assert torch.equal(caches.nan_to_num(7.5), expected.nan_to_num(7.5))  # 7.5: no draw of randn is that large
    assert int((~caches.isnan()).sum()) == 2 * tokens * kv_heads * head_dim


@pytest.mark.gpu
def test_slots_beyond_32_bits():
    keys, values = torch.zeros(2, 2**21 + 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, 8, 128, device="cuda").to(torch.bfloat16)
    kernel.store_kvcache(key, value, keys, values, torch.tensor([2**21, 5], device="cuda"))
    assert torch.equal(keys[[2**21, 5]], key) and torch.equal(values[[2**21, 5]], value)
    assert not keys[:5].any() and not values[-2].any()

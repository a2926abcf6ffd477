"""Keys and values land in the slots that the mapping names, bit for bit, and nowhere else."""

import pytest
import torch

from nanovllm.ops.store_kvcache import reference, store_kvcache

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def by_hand(key, value, keys, values, slots):
    keys, values = keys.clone(), values.clone()
    for row, slot in enumerate(slots.tolist()):
        keys[slot], values[slot] = key[row], value[row]
    return keys, values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "slots", "kv_heads", "head_dim"),
    [(0, 4, 1, 8), (1, 1, 1, 1), (1, 9, 3, 16), (7, 12, 2, 80), (32, 32, 1, 64)],
)
def test_writes_each_slot_and_no_other(tokens, slots, kv_heads, head_dim, dtype):
    torch.manual_seed(tokens + slots)
    key, value = torch.randn(2, tokens, kv_heads, head_dim).to(dtype)
    keys, values = torch.randn(2, slots, kv_heads, head_dim).to(dtype)
    mapping = torch.randperm(slots)[:tokens]
    expected = by_hand(key, value, keys, values, mapping)
    store_kvcache(key, value, keys, values, mapping)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_what_is_not_named_keeps_even_its_nan():
    keys, values = torch.full((2, 6, 1, 2), torch.nan)
    store_kvcache(torch.ones(2, 1, 2), torch.zeros(2, 1, 2), keys, values, torch.tensor([4, 1]))
    assert keys.isnan().all((1, 2)).tolist() == [True, False, True, True, False, True]
    assert torch.equal(values[[1, 4]], torch.zeros(2, 1, 2))


def test_rows_may_be_slices_of_one_projection():
    torch.manual_seed(1)
    qkv = torch.randn(5, 8, 16)  # 4 query heads, 2 key heads, 2 value heads
    key, value = qkv[:, 4:6], qkv[:, 6:8]
    assert not key.is_contiguous()
    data = torch.zeros(2, 3, 4, 2, 16)  # keys and values, 3 blocks of 4
    mapping = torch.tensor([11, 0, 3, 4, 8])
    store_kvcache(key, value, data[0].flatten(0, 1), data[1].flatten(0, 1), mapping)
    for row, slot in enumerate(mapping.tolist()):
        assert torch.equal(data[0, slot // 4, slot % 4], key[row])
        assert torch.equal(data[1, slot // 4, slot % 4], value[row])
    assert int((data[0].abs().sum((2, 3)) > 0).sum()) == 5


def test_rows_of_padding_write_nothing():
    keys, values = torch.full((2, 3, 1, 2), torch.nan)
    key = torch.arange(8.0).view(4, 1, 2)
    reference.store_kvcache(key, -key, keys, values, torch.tensor([-1, 2, -1, 0]))
    assert torch.equal(keys[[2, 0]], key[[1, 3]])
    assert torch.equal(values[[2, 0]], -key[[1, 3]])
    assert keys[1].isnan().all()
    reference.store_kvcache(key, key, keys, values, torch.full((4,), -1))
    assert torch.equal(values[[2, 0]], -key[[1, 3]])

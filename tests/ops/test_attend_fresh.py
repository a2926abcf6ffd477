"""Decodes from the projection on, in one kernel: what ``rotate_and_store`` and ``attend`` mean one after the other."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from nanovllm.ops.attention import paged, reference
from nanovllm.ops.rotate_and_store.reference import rotate_and_store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = DEVICE.type == "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3}
if GPU:
    TOLERANCE[torch.bfloat16] = 4e-2
FEW, MANY = 1, 100_000
"""Processors: contexts stay uncut, or every chunk is a program."""
CHUNK = paged.MIN_CHUNK
FLOAT8 = torch.float8_e4m3fn


def check(contexts, *, head_dim=16, kv_heads=2, group=2, block_size=16, dtype=torch.float32, norms=True, float8=False,
          window=None, processors=FEW, softcap=None):  # fmt: skip
    """Compare outputs and caches. Where no token lies there is NaN, and so in the slots of the new tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    sizes = [-(-context // block_size) for context in contexts]
    ids = torch.randperm(sum(sizes) + 2, generator=generator).tolist()
    tables = [[ids.pop() for _ in range(size)] for size in sizes]
    caches = torch.full((2, sum(sizes) + 2, block_size, kv_heads, head_dim), torch.nan, device=DEVICE, dtype=dtype)
    for context, table in zip(contexts, tables, strict=True):
        for place in range(context - 1):
            caches[:, table[place // block_size], place % block_size] = draw(2, kv_heads, head_dim)
    scales = ()
    if float8:
        scales = tuple((torch.rand(2, kv_heads, generator=generator) * 0.02 + 0.01).to(DEVICE))
        caches = (caches.float() / torch.stack(scales)[:, None, None, :, None]).to(FLOAT8)
    heads = group * kv_heads
    qkv = draw(len(contexts), heads + 2 * kv_heads + 1, head_dim)[:, : heads + 2 * kv_heads]
    weights = (1 + draw(head_dim) / 4, 1 + draw(head_dim) / 4, 1e-6) if norms else None
    turns = torch.rand(len(contexts), 1, head_dim // 2, generator=generator) * 7
    cos = torch.cat((turns.cos(), turns.cos()), -1).to(DEVICE, dtype)
    sin = torch.cat((-turns.sin(), turns.sin()), -1).to(DEVICE, dtype)

    expected_caches = caches.clone()
    slots = torch.tensor(
        [table[(context - 1) // block_size] * block_size + (context - 1) % block_size
         for context, table in zip(contexts, tables, strict=True)], device=DEVICE,
    )  # fmt: skip
    flat = [cache.flatten(0, 1) for cache in expected_caches]
    query = rotate_and_store(qkv, weights, cos, sin, *flat, slots, *scales)
    plan = paged.plan([1] * len(contexts), contexts, tables, block_size, DEVICE)
    plan = replace(plan, processors=processors)
    assert paged.attends_fresh(plan)
    out = paged.attend_fresh(qkv, weights, cos, sin, *caches, plan, 0.3, window, *scales, softcap=softcap)
    # a last bit of float8 is an eighth: what is attended to is what was written
    meant = [cache.float() * scale[:, None] for cache, scale in zip(caches, scales, strict=False)] or expected_caches
    starts = torch.arange(len(contexts) + 1)
    table = torch.tensor([row + [-1] * (max(sizes) - len(row)) for row in tables], device=DEVICE)
    expected = reference.attend(query, *meant, starts, torch.tensor(contexts), table, 0.3, window, softcap)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(out, expected, rtol=bound, atol=bound)
    assert out.is_contiguous()
    near = (0.13 if GPU else 0.6) if float8 else bound  # the interpreter of Triton 3.9 loses carries when it rounds
    torch.testing.assert_close(caches.float(), expected_caches.float(), rtol=near, atol=bound, equal_nan=True)
    untouched = torch.ones(caches.shape[1] * block_size, dtype=torch.bool)
    untouched[slots.cpu()] = False
    same = [cache.flatten(0, 1).view(torch.uint8)[untouched.to(DEVICE)] for cache in (*caches, *expected_caches)]
    assert torch.equal(same[0], same[2])
    assert torch.equal(same[1], same[3])


@pytest.mark.parametrize("float8", [False, True])
def test_capped_scores(float8):
    check([1, 17, CHUNK + 1], softcap=0.2, float8=float8)


@pytest.mark.parametrize("processors", [FEW, MANY])
@pytest.mark.parametrize("window", [None, 5, CHUNK + 10])
@pytest.mark.parametrize("norms", [True, False])
def test_outputs_and_caches(norms, window, processors):
    check([1, 16, 17, CHUNK, CHUNK + 1, 2 * CHUNK + 3], norms=norms, window=window, processors=processors)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128, 256] if GPU else [24, 64])
def test_types_and_head_dims(head_dim, dtype):
    for processors in (FEW, MANY):
        check([1, 33, CHUNK + 5], head_dim=head_dim, dtype=dtype, processors=processors)


@pytest.mark.parametrize("block_size", [1, 12, 64])
@pytest.mark.parametrize("group", [1, 3, 15, 16])
def test_blocks_and_groups(group, block_size):
    check([1, 40, CHUNK + 5], group=group, block_size=block_size, kv_heads=1)


@pytest.mark.skipif(
    GPU and torch.cuda.get_device_capability() < paged.FLOAT8_CAPABILITY, reason="needs compute capability 8.9"
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_a_cache_of_float8(window, dtype):
    for processors in (FEW, MANY):
        check([1, 40, CHUNK + 70], head_dim=24, float8=True, dtype=dtype, window=window, processors=processors)


def test_plans_that_are_not_for_it():
    mixed = paged.plan([1, 2], [5, 6], [[0], [1]], 16, DEVICE)
    assert not paged.attends_fresh(mixed)
    fixed = paged.plan([1], [5], [[0]], 16, DEVICE, prompt_lens=[2])
    assert not paged.attends_fresh(fixed)

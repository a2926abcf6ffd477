"""The Triton kernels mean the reference: on a GPU as compiled, elsewhere in Triton's interpreter, on small cases.

Unlike ``test_attention``, unused places hold NaN: the kernels must not even read them. The interpreter shows neither
races nor speed, and its ``tl.dot`` is wrong for bfloat16, which is therefore left to GPUs.
"""

import random
import re
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import nanovllm.ops.attention as front
from nanovllm.errors import ConfigError
from nanovllm.ops.attention import find_backend, paged, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The 16-bit types round the probabilities once more than the reference does; sums run in another order.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3}
if DEVICE.type == "cuda":
    TOLERANCE[torch.bfloat16] = 3e-2

FEW, MANY = 1, 100_000
"""Processors: contexts stay uncut, or every chunk is a program."""


@dataclass(frozen=True)
class Case:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    tables: list[list[int]]

    def by_reference(self, scale: float, window: int | None) -> torch.Tensor:
        starts = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0).tolist()])
        longest = max(map(len, self.tables))
        table = torch.tensor([row + [-1] * (longest - len(row)) for row in self.tables], device=DEVICE)
        contexts = torch.tensor(self.context_lens)
        return reference.attend(self.query, self.keys, self.values, starts, contexts, table, scale, window)

    def by_kernel(self, scale: float, window: int | None = None, processors: int = FEW) -> torch.Tensor:
        plan = paged.plan(self.query_lens, self.context_lens, self.tables, self.keys.shape[1], DEVICE)
        plan = replace(plan, processors=processors)
        return paged.attend(self.query, self.keys, self.values, plan, scale, window)

    def only(self, request: int) -> "Case":
        """The step with one of the requests alone."""
        first = sum(self.query_lens[:request])
        size, context, table = self.query_lens[request], self.context_lens[request], self.tables[request]
        return replace(
            self, query=self.query[first : first + size], query_lens=[size], context_lens=[context], tables=[table]
        )


def make_case(
    query_lens, context_lens, *, block_size=16, kv_heads=1, group=2, head_dim=16, dtype=torch.float32, heads_major=False
):  # fmt: skip
    """Draw a case: blocks anywhere in the pool, query rows cut out of wider ones, NaN wherever no token lies."""
    # every second table has a block more than its tokens need, and then the -1 that pads a table
    sizes = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(sizes) + len(sizes) + 3
    ids = random.Random(0).sample(range(num_blocks), num_blocks)
    tables, used = [], 0
    for place, size in enumerate(sizes):
        tables.append(ids[used : used + size] + ([ids[used + size], -1] if place % 2 else []))
        used += size + 1
    shape = (num_blocks, block_size, kv_heads, head_dim)
    keys, values = (torch.full(shape, torch.nan) for _ in range(2))
    for context, table in zip(context_lens, tables, strict=True):
        slots = torch.tensor([table[place // block_size] * block_size + place % block_size for place in range(context)])
        for cache in (keys, values):
            cache.view(-1, kv_heads, head_dim)[slots] = torch.randn(context, kv_heads, head_dim)
    keys, values = (cache.to(DEVICE, dtype) for cache in (keys, values))
    if heads_major:
        keys, values = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (keys, values))
    wide = torch.randn(sum(query_lens), kv_heads * group + 3, head_dim).to(DEVICE, dtype)
    return Case(wide[:, 1 : 1 + kv_heads * group], keys, values, list(query_lens), list(context_lens), tables)


def check(case: Case, *, window: int | None = None, processors: int = FEW) -> None:
    scale = case.query.shape[2] ** -0.5
    out = case.by_kernel(scale, window, processors)
    assert out.dtype is case.query.dtype
    assert out.is_contiguous()
    bound = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, case.by_reference(scale, window), rtol=bound, atol=bound)


STEPS = {
    "first tokens": ([1, 1], [1, 1]),
    "decodes": ([1, 1, 1, 1], [15, 16, 17, 150]),
    "fresh prefills": ([2, 15, 16, 17], [2, 15, 16, 17]),
    "chunks": ([2, 16, 31], [33, 64, 32]),
    "mixed": ([1, 7, 1, 12, 1, 3, 1], [2, 7, 33, 30, 16, 3, 128]),
    "more than one piece": ([130, 2], [131, 150]),
}


@pytest.mark.parametrize("block_size", [1, 12, 16, 256])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_every_kind(step, block_size):
    check(make_case(*STEPS[step], block_size=block_size))


@pytest.mark.parametrize("window", [1, 5, 16, 70, 1000])
@pytest.mark.parametrize("step", ["decodes", "chunks", "mixed", "more than one piece"])
def test_windows(step, window):
    check(make_case(*STEPS[step]), window=window)


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 17])
def test_groups(group):
    check(make_case([1, 3, 1], [20, 17, 9], kv_heads=2, group=group))


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 96, 128, 256] if DEVICE.type == "cuda" else [16, 24, 64])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_types_and_head_dims(dtype, head_dim):
    for window in (None, 6):
        check(make_case([1, 5, 1], [20, 21, 150], head_dim=head_dim, dtype=dtype), window=window)


def test_blocks_may_be_heads_major():
    case = make_case(*STEPS["mixed"], kv_heads=2, heads_major=True)
    assert not case.keys.is_contiguous()
    check(case)


CHUNK = paged.MIN_CHUNK
AT_THE_EDGES = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 129]


@pytest.mark.parametrize("processors", [FEW, MANY])
@pytest.mark.parametrize("window", [None, 200, CHUNK, CHUNK + 100])
def test_contexts_of_several_chunks(window, processors):
    check(make_case([1] * 5, AT_THE_EDGES), window=window, processors=processors)


def test_more_chunks_than_are_joined_at_once():
    check(make_case([1, 1], [9 * CHUNK + 1, 17]), processors=MANY)


@pytest.mark.parametrize("window", [None, CHUNK + 100])
def test_cut_or_uncut_in_company_or_alone_a_decode_gets_the_same_bits(window):
    dtype = list(TOLERANCE)[-1]
    case = make_case([1, 1, 4, 1], [2 * CHUNK + 129, 60, 10, 3 * CHUNK], kv_heads=2, dtype=dtype)
    out = case.by_kernel(0.3, window, FEW)
    assert torch.equal(out, case.by_kernel(0.3, window, MANY))
    for request, first in ((0, 0), (1, 1), (3, 6)):
        for processors in (FEW, MANY):
            assert torch.equal(out[first], case.only(request).by_kernel(0.3, window, processors)[0])


@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_in_chunks_gets_the_same_bits(window):
    case = make_case([150], [150], dtype=list(TOLERANCE)[-1])
    whole = case.by_kernel(0.3, window)
    for first, stop in ((0, 70), (70, 87), (87, 150)):
        chunk = replace(case, query=case.query[first:stop], query_lens=[stop - first], context_lens=[stop])
        assert torch.equal(chunk.by_kernel(0.3, window), whole[first:stop])


def test_chunks_grow_with_the_context_so_that_they_stay_few():
    contexts = [1, CHUNK, CHUNK + 1, CHUNK * paged.MAX_CHUNKS, CHUNK * paged.MAX_CHUNKS + 1, 131_072]
    tables = [list(range(-(-context // 256))) for context in contexts]
    plan = paged.plan([1] * len(contexts), contexts, tables, 256, torch.device("cpu"))
    rows = sorted(plan.decodes.tolist())
    assert [row[:2] for row in rows] == [[place, context] for place, context in enumerate(contexts)]
    assert [row[3] for row in rows] == [CHUNK, CHUNK, CHUNK, CHUNK, 2 * CHUNK, 2048]
    parts = [1, 1, 2, 64, 33, 64]
    assert plan.owners.bincount().tolist() == parts[::-1], "the longest come first"


def test_the_plan_of_a_mixed_step():
    plan = paged.plan([1, 130, 1], [9, 140, 17], [[5, 6, 7], list(range(20, 29)), [1, 2]], 16, torch.device("cpu"))
    assert plan.tables.tolist() == [5, *range(20, 29), 1, 2], "blocks past the context are left out"
    assert plan.decodes.tolist() == [[131, 17, 10, CHUNK, 0], [0, 9, 0, CHUNK, 1]]
    assert plan.pieces.tolist() == [[129, 2, 138, 1], [1, 128, 10, 1]]
    assert (plan.longest, plan.total) == (17, 26)


@pytest.mark.parametrize(
    ("capability", "installed", "chosen", "why"),
    [
        ((9, 0), True, "paged", "triton .its kernels run on this device"),
        ((8, 0), True, "paged", "triton .its kernels run on this device"),
        ((7, 5), True, "sdpa", "sdpa .this device has compute capability 7.5"),
        ((9, 0), False, "sdpa", "sdpa .triton is not installed"),
    ],
)
def test_auto_takes_triton_where_it_runs_and_says_so(capability, installed, chosen, why, monkeypatch, caplog):
    def import_module(name):
        if name == "triton" and not installed:
            raise ModuleNotFoundError(name)
        return plain(name)

    plain = front.import_module
    monkeypatch.setattr(front, "import_module", import_module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with caplog.at_level("INFO", logger="nanovllm.ops.attention"):
        assert find_backend("auto", "cuda").__name__ == f"nanovllm.ops.attention.{chosen}"
    (record,) = caplog.records
    assert record.getMessage().startswith("attention backend: ")
    assert re.search(why, record.getMessage())
    if chosen == "sdpa":
        with pytest.raises(ConfigError, match="attention_backend is 'triton', but .*; use 'auto' or 'sdpa'"):
            find_backend("triton", "cuda")


def test_auto_takes_sdpa_on_a_cpu():
    assert find_backend("auto", "cpu").__name__ == "nanovllm.ops.attention.sdpa"


@pytest.mark.gpu
def test_offsets_past_31_bits():
    """32,768 blocks of 16 tokens, 32 heads and 256 channels in float16: 8 GiB for the keys, and the same for values."""
    shape = (32_768, 16, 32, 256)
    keys, values = (torch.empty(shape, dtype=torch.float16, device=DEVICE).fill_(torch.nan) for _ in range(2))
    last = [shape[0] - 1, shape[0] - 2]
    for cache in (keys, values):
        cache[last] = torch.randn(2, *shape[1:], device=DEVICE).half()
    query = torch.randn(4, 32, 256, device=DEVICE).half()
    check(Case(query, keys, values, [1, 3], [16, 16], [last[:1], last[1:]]))

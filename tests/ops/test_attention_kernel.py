"""The Triton kernels mean the reference: on a GPU as compiled, elsewhere in Triton's interpreter, on small cases.

Unlike ``test_attention``, unused places hold NaN: the kernels must not even read them. The interpreter shows neither
races nor speed, and its ``tl.dot`` is wrong for bfloat16, which is therefore left to GPUs.
"""

import random
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import nanovllm.ops.attention as front
from nanovllm.cuda_graphs import DecodeGraphs, lay, split
from nanovllm.errors import ConfigError
from nanovllm.ops.attention import find_backend, paged, reference
from nanovllm.ops.rotate_and_store.reference import quantize
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Span

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The 16-bit types round the probabilities once more than the reference does; sums run in another order.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3}
if DEVICE.type == "cuda":
    TOLERANCE[torch.bfloat16] = 3e-2

FEW, MANY = 1, 100_000
"""Processors: contexts stay uncut, or every chunk is a program."""


def distinct(*tiles):
    """Tiles without repetition; to the interpreter, warps and stages of the pipeline mean nothing."""
    return list({tile if DEVICE.type == "cuda" else tile[0]: tile for tile in tiles}.values())


@dataclass(frozen=True)
class Case:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    tables: list[list[int]]

    def by_reference(self, scale: float, window: int | None, softcap: float | None = None) -> torch.Tensor:
        starts = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0).tolist()])
        longest = max(map(len, self.tables))
        table = torch.tensor([row + [-1] * (longest - len(row)) for row in self.tables], device=DEVICE)
        contexts = torch.tensor(self.context_lens)
        return reference.attend(self.query, self.keys, self.values, starts, contexts, table, scale, window, softcap)

    def by_kernel(
        self, scale: float, window: int | None = None, processors: int = FEW, one_tile: bool = False
    ) -> torch.Tensor:
        plan = paged.plan(self.query_lens, self.context_lens, self.tables, self.keys.shape[1], DEVICE)
        plan = replace(plan, processors=processors, one_tile=one_tile)
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


@pytest.mark.parametrize("block_size", [1, 12, 16, 256] if DEVICE.type == "cuda" else [12, 256])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_every_kind(step, block_size):
    check(make_case(*STEPS[step], block_size=block_size))


@pytest.mark.parametrize("window", [1, 5, 16, 70, 1000] if DEVICE.type == "cuda" else [5, 70])
@pytest.mark.parametrize("step", ["decodes", "chunks", "mixed", "more than one piece"])
def test_windows(step, window):
    check(make_case(*STEPS[step]), window=window)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("processors", [FEW, MANY])
@pytest.mark.parametrize("step", ["decodes", "mixed", "more than one piece"])
def test_capped_scores(step, processors, window):
    case = make_case(*STEPS[step])
    plan = replace(paged.plan(case.query_lens, case.context_lens, case.tables, 16, DEVICE), processors=processors)
    for softcap in (0.3, 50.0):
        out = paged.attend(case.query, case.keys, case.values, plan, 0.7, window, softcap=softcap)
        expected = case.by_reference(0.7, window, softcap)
        torch.testing.assert_close(
            out, expected, rtol=2e-5, atol=2e-5
        )  # what a cap of 50 is multiplied with is rounded
    uncapped = case.by_reference(0.7, window)
    assert (case.by_reference(0.7, window, 0.3) - uncapped).abs().max() > 0.01 or max(case.context_lens) == 1


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


@pytest.mark.parametrize("one_tile", [False, True])
def test_more_chunks_than_are_joined_at_once(one_tile, monkeypatch):
    monkeypatch.setattr(paged, "MIN_CHUNK", 32)
    monkeypatch.setattr(paged, "MAX_CHUNKS", 1000)
    case = make_case([1, 1], [65 * 32 + 1, 17])  # 66 chunks
    torch.testing.assert_close(
        case.by_kernel(0.3, None, MANY, one_tile), case.by_reference(0.3, None), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("window", [None, CHUNK + 100])
def test_cut_or_uncut_in_company_or_alone_a_decode_gets_the_same_bits(window):
    dtype = list(TOLERANCE)[-1]
    case = make_case([1, 1, 4, 1], [2 * CHUNK + 129, 60, 10, 3 * CHUNK], kv_heads=2, dtype=dtype)
    out = case.by_kernel(0.3, window, FEW, True)
    assert torch.equal(out, case.by_kernel(0.3, window, MANY, True))
    for request, first in ((0, 0), (1, 1), (3, 6)):
        for processors in (FEW, MANY):
            assert torch.equal(out[first], case.only(request).by_kernel(0.3, window, processors, True)[0])


@pytest.mark.parametrize("window", [None, 50])
def test_a_prompt_in_chunks_gets_the_same_bits(window):
    case = make_case([150], [150], dtype=list(TOLERANCE)[-1])
    whole = case.by_kernel(0.3, window)
    for first, stop in ((0, 70), (70, 87), (87, 150)):
        chunk = replace(case, query=case.query[first:stop], query_lens=[stop - first], context_lens=[stop])
        out = chunk.by_kernel(0.3, window)
        if DEVICE.type == "cuda":
            assert torch.equal(out, whole[first:stop])
        else:  # NumPy's products, which stand in for the matrix units, differ by a row's place on some processors
            torch.testing.assert_close(out, whole[first:stop], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("block_size", [16, 128, 256] if DEVICE.type == "cuda" else [16, 256])
@pytest.mark.parametrize("tile", distinct(*paged.DECODE_TILES, *paged.CUT_TILES), ids=str)
def test_tiles_in_one_block_and_across_blocks(tile, block_size, monkeypatch):
    monkeypatch.setattr(paged, "DECODE_TILES", (tile,))
    monkeypatch.setattr(paged, "CUT_TILES", (tile,))
    case = make_case([1, 1], [2 * CHUNK + 129, 130], block_size=block_size)
    for processors in (FEW, MANY):
        check(case, processors=processors)


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("keys", [16, 64, 128])
def test_prefill_tiles_in_one_block_and_across_blocks(keys, block_size, monkeypatch):
    monkeypatch.setattr(paged, "PREFILL_TILES", ((keys, 8, 3),))
    for window in (None, 70):
        check(make_case([200, 30], [210, 180], block_size=block_size), window=window)


where_float8_is = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < paged.FLOAT8_CAPABILITY,
    reason="needs compute capability 8.9",
)


def in_float8(case: Case, key_scales: torch.Tensor, value_scales: torch.Tensor) -> tuple[Case, Case]:
    """The case with a cache of float8, and what it means: the numbers of that cache times their scales."""
    pairs = ((case.keys, key_scales), (case.values, value_scales))
    narrow = [quantize(cache.flatten(0, 1), scales).view(cache.shape) for cache, scales in pairs]
    wide = [cache.float() * scales[:, None] for cache, scales in zip(narrow, (key_scales, value_scales), strict=True)]
    return replace(case, keys=narrow[0], values=narrow[1]), replace(case, keys=wide[0], values=wide[1])


def check_float8(case: Case, window: int | None = None, processors: int = FEW) -> None:
    scales = torch.rand(2, case.keys.shape[2], device=DEVICE) * 0.1 + 0.01
    case, meant = in_float8(case, *scales)
    scale = case.query.shape[2] ** -0.5
    plan = paged.plan(case.query_lens, case.context_lens, case.tables, case.keys.shape[1], DEVICE)
    out = paged.attend(case.query, case.keys, case.values, replace(plan, processors=processors), scale, window, *scales)
    assert out.dtype is case.query.dtype
    bound = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, meant.by_reference(scale, window), rtol=bound, atol=bound)


@where_float8_is
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_cache_of_float8(block_size, window, dtype):
    case = make_case(*STEPS["mixed"], block_size=block_size, kv_heads=3, dtype=dtype, head_dim=24)
    check_float8(case, window=window)


@where_float8_is
@pytest.mark.parametrize("processors", [FEW, MANY])
def test_long_contexts_of_float8(processors):
    check_float8(make_case([1, 1, 1], [2 * CHUNK + 129, CHUNK, 17], kv_heads=2, block_size=64), processors=processors)


@pytest.mark.gpu
@where_float8_is
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_float8_head_dims(head_dim):
    step = ([1, 5, 1, 130], [20, 21, 700, 300])
    for dtype in (torch.float16, torch.bfloat16):
        for processors in (FEW, MANY):
            check_float8(make_case(*step, head_dim=head_dim, dtype=dtype, kv_heads=2), processors=processors)


def make_shared_case(groups, alone=(), *, block_size=16, **options):
    """Draw decodes, for each group (tokens in common, contexts), and between them others that share nothing."""
    contexts, spans, size = [], [], lambda context: -(-context // block_size)
    for common, members in groups:
        contexts += members
        spans += [common // block_size] * len(members)
    case = make_case([1] * (len(contexts) + len(alone)), [*contexts, *alone], block_size=block_size, **options)
    first = 0
    for _, members in groups:
        for place in range(first, first + len(members)):
            case.tables[place][: spans[place]] = case.tables[first][: spans[place]]
        first += len(members)
    for context, table in zip(case.context_lens, case.tables, strict=True):
        assert not case.keys[table[: size(context) - 1]].isnan().any()
    order = random.Random(1).sample(range(len(case.tables)), len(case.tables))
    return replace(case, context_lens=[case.context_lens[at] for at in order], tables=[case.tables[at] for at in order])


SMALL_CHUNK = 64


@pytest.fixture
def sharing_pays(monkeypatch):
    monkeypatch.setattr(paged, "LEAST_SAVED", 1)
    monkeypatch.setattr(paged, "MIN_CHUNK", SMALL_CHUNK)
    monkeypatch.setattr(paged, "SHARED_BY", 8)


def plan_of(case: Case) -> paged.Plan:
    return paged.plan(case.query_lens, case.context_lens, case.tables, case.keys.shape[1], DEVICE)


def every_part(plan: paged.Plan) -> list[int]:
    """The parts that are computed, those in common first."""
    parts = [plan.decodes[first + member, 4] + chunk for first, count, chunk in plan.shared for member in range(count)]
    return [int(part) for part in (*parts, *plan.rest)]


GROUPS = {
    "two and others": ([(128, [130, 200, 128 + 64, 140]), (64, [65, 65, 70, 100, 127])], [1, 50, 64, 300]),
    "more than a line": ([(64, [65 + place for place in range(17)])], [66]),
    "all but the last token": ([(192, [193, 193, 193, 193])], []),
    "the last token too": ([(192, [192, 192, 192, 192, 193])], [192]),
}


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("name", GROUPS)
def test_what_decodes_have_in_common(name, block_size, window, sharing_pays):
    case = make_shared_case(*GROUPS[name], block_size=block_size)
    plan = plan_of(case)
    assert plan.shared.shape[0], "something is shared"
    assert sorted(every_part(plan)) == list(range(plan.owners.shape[0])), "each part is computed once"
    for processors in (FEW, MANY) if name == "two and others" else (FEW,):
        check(case, window=window, processors=processors)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 17])
def test_what_decodes_have_in_common_in_groups_of_heads(group, sharing_pays):
    case = make_shared_case([(64, [65, 80, 128, 129])], [70], kv_heads=2, group=group, head_dim=24)
    assert plan_of(case).shared.shape[0]
    check(case)


@pytest.mark.parametrize("tile", distinct(*paged.SHARED_TILES), ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_shared_tiles_and_types(dtype, tile, sharing_pays, monkeypatch):
    monkeypatch.setattr(paged, "SHARED_TILES", (tile,))
    for rows in (16, 64, 128):
        monkeypatch.setattr(paged, "SHARED_ROWS", rows)
        check(make_shared_case([(128, [130 + place for place in range(11)])], [70], dtype=dtype, head_dim=64))


@where_float8_is
def test_what_decodes_have_in_common_with_capped_scores(sharing_pays):
    case = make_shared_case(*GROUPS["two and others"])
    plan = paged.plan(case.query_lens, case.context_lens, case.tables, 16, DEVICE)
    assert plan.shared.shape[0]
    out = paged.attend(case.query, case.keys, case.values, plan, 0.25, softcap=0.3)
    torch.testing.assert_close(out, case.by_reference(0.25, None, 0.3), rtol=2e-5, atol=2e-5)


def test_what_decodes_have_in_common_in_float8(sharing_pays):
    for block_size in (16, 64):
        case = make_shared_case([(128, [130, 150, 170, 190])], [70], kv_heads=2, block_size=block_size)
        assert plan_of(case).shared.shape[0]
        check_float8(case)
        check_float8(case, window=80, processors=MANY)


def test_random_groups(sharing_pays):
    rng = random.Random(3)
    for most in (40, 6, 4):
        groups = []
        for _ in range(1 if most == 40 else rng.randint(2, 3)):
            common = 64 * rng.randint(1, 3)
            groups.append((common, [common + rng.randint(1, 90) for _ in range(rng.randint(most // 2 + 2, most))]))
        alone = [rng.randint(1, 300) for _ in range(rng.randint(0, 3))]
        case = make_shared_case(groups, alone, block_size=rng.choice([16, 64]))
        assert plan_of(case).shared.shape[0]
        check(case)


def test_the_lists_of_a_step_that_shares(sharing_pays):
    common = list(range(40, 48))  # 128 tokens
    contexts, place = [200, 130, 129, 64, 150, 192], iter(range(100, 200))
    tables = []
    for context, shares in zip(contexts, [0, 1, 1, 0, 1, 1], strict=True):
        blocks = -(-context // 16)
        tables.append((common if shares else []) + [next(place) for _ in range(blocks - 8 * shares)])
    plan = paged.plan([1] * 6, contexts, tables, 16, torch.device("cpu"))
    at = [sum(-(-context // 16) for context in contexts[:request]) for request in range(6)]
    assert plan.decodes.tolist() == [
        [5, 192, at[5], 64, 0], [4, 150, at[4], 64, 3], [1, 130, at[1], 64, 6], [2, 129, at[2], 64, 9],
        [0, 200, at[0], 64, 12], [3, 64, at[3], 64, 16],
    ]  # fmt: skip
    assert plan.owners.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 4 + [5]
    assert plan.shared.tolist() == [[0, 4, 0], [0, 4, 1]]
    assert plan.rest.tolist() == [2, 5, 8, 11, 12, 13, 14, 15, 16]


def test_chunks_grow_until_the_parts_of_a_step_that_shares_are_few(sharing_pays, monkeypatch):
    case = make_shared_case([(256, [260, 300, 340, 380])], [70])
    assert plan_of(case).owners.shape[0] == 5 + 5 + 6 + 6 + 2
    monkeypatch.setattr(paged, "MOST_PARTS", 23)
    plan = plan_of(case)
    assert plan.owners.shape[0] == 4 * 3 + 1 and plan.shared[:, :2].tolist() == [[0, 4]] * 2
    check(case)


def groups_of(tables, contexts, block_size=16, chunk=32):
    """What is found, as the numbers of the requests and the chunks in common."""
    lens, flat = np.array([len(table) for table in tables]), np.array([block for table in tables for block in table])
    order = np.argsort(-np.array(contexts), kind="stable")
    starts = np.cumsum(lens) - lens
    found = paged.find_groups(
        np.array(contexts)[order], starts[order], np.full(len(order), chunk), flat.astype(np.int32), block_size
    )
    return [(sorted(order[members].tolist()), depth) for members, depth in found]


def test_groups_are_found_by_whole_tables(monkeypatch):
    monkeypatch.setattr(paged, "LEAST_SAVED", 1)
    own = iter(range(1000, 2000))

    def tables(*heads, blocks=6):
        return [[*head, *(next(own) for _ in range(blocks - len(head)))] for head in heads]

    def six(*heads):
        return groups_of(tables(*heads), [96] * len(heads))

    assert six(*[[1, 2, 3, 4]] * 5) == [([0, 1, 2, 3, 4], 2)]
    assert six(*[[1, 2, 3]] * 5) == [([0, 1, 2, 3, 4], 1)], "whole chunks only"
    assert six(*[[1]] * 5) == [], "the first block alone is half a chunk"
    assert six(*[[1, 2]] * 3) == [], "three are not enough"
    assert six([0, 2], [1, 2], [3, 2], [4, 2]) == [], "the same block after others"
    assert six(*[[1, 2]] * 4, *[[3, 4]] * 4) == [([0, 1, 2, 3], 1), ([4, 5, 6, 7], 1)]
    assert six(*[[1, 2, 3, 4, 5, 6]] * 4) == [([0, 1, 2, 3], 3)], "identical tables"
    assert six([1, 2], *[[1, 2, 3, 4]] * 5) == [([0, 1, 2, 3, 4, 5], 1)], "compared with the longest, here the first"
    assert six(*[[1, 2, 3, 4]] * 5, [1, 2]) == [([0, 1, 2, 3, 4], 2)], "what saves most"
    nested = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert groups_of(nested, [32, 64, 96, 96, 96]) == [([1, 2, 3, 4], 2)], "a context of one chunk shares nothing"
    assert groups_of(nested, [32, 33, 65, 96, 96]) == [([1, 2, 3, 4], 1)], "of 33 tokens, one chunk is whole"
    assert groups_of([[7]] * 4, [200] * 4, block_size=256, chunk=64) == [([0, 1, 2, 3], 3)], "in one block"
    monkeypatch.setattr(paged, "LEAST_SAVED", 3 * 64 + 1)
    assert six(*[[1, 2, 3, 4]] * 4) == [], "too few tokens saved"


def test_nothing_is_shared_where_bits_must_not_depend_on_others(sharing_pays):
    case = make_shared_case(*GROUPS["two and others"])
    prompts = [1] * len(case.tables)
    plan = paged.plan(case.query_lens, case.context_lens, case.tables, 16, DEVICE, prompt_lens=prompts)
    assert plan.shared.shape[0] == plan.rest.shape[0] == 0


@pytest.mark.parametrize("name", [*GROUPS, "nothing"])
def test_the_lists_of_a_graph_are_padded(name, sharing_pays, monkeypatch):
    """The kernels on what a graph of 20 rows reads: padding computes nothing, and writes nothing."""
    if DEVICE.type == "cpu":
        facts = SimpleNamespace(multi_processor_count=1, shared_memory_per_block_optin=1 << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    case = make_shared_case(*GROUPS[name]) if name in GROUPS else make_case([1, 1, 1], [200, 130, 1])
    number, rows = len(case.tables), 20
    graphs = DecodeGraphs.__new__(DecodeGraphs)
    graphs.backend, graphs.deterministic, graphs._processors = paged, False, MANY
    graphs.cache = SimpleNamespace(data=torch.empty(1, 2, 1, 16, case.keys.shape[2], 1), block_size=16)
    lens = np.array([len(table) for table in case.tables])
    blocks = np.array([block for table in case.tables for block in table], np.int32)
    ends = [context - 1 for context in case.context_lens]
    slots = [table[end // 16] * 16 + end % 16 for end, table in zip(ends, case.tables, strict=True)]
    graphs._max_blocks, graphs._views, graphs.drawn = int(lens.max()), {}, SimpleNamespace(source=lambda span: 7)
    graphs._inbox = torch.full((1, 20_000), -9, dtype=torch.int32)
    params = SamplingParams(temperature=0.5, top_k=3)
    spans = [
        Span(
            Request(request_id="", prompt_token_ids=[1], params=params, max_tokens=9, arrival=0, block_ids=table),
            end, end + 1, True,
        )
        for end, table in zip(ends, case.tables, strict=True)
    ]  # fmt: skip
    monkeypatch.setattr(paged, "SHORT_CHUNKS", {})
    cuts = graphs._write(0, spans, rows)
    fields = lay(rows, cuts, graphs._max_blocks)
    field = split(graphs._inbox[0], fields, torch)
    assert bool(cuts.shared) == bool(cuts.rest) == (name in GROUPS)
    assert cuts.chunk == SMALL_CHUNK and not cuts.long
    assert int(field["size"]) == fields["tables"].start + len(blocks)
    assert field["tables"][: len(blocks)].tolist() == blocks.tolist()
    assert field["slots"].tolist() == [*slots, *[-1] * (rows - number)]
    assert field["sources"].tolist() == [7] * number + [0] * (rows - number)
    assert field["positions"].tolist() == ends + [0] * (rows - number), "there is no angle of any other padding"
    decodes, owners, rest, shared = (field[name].long() for name in ("decodes", "owners", "rest", "shared"))
    assert len(decodes) == rows + 1 and not decodes[number:].any() and decodes[:number, 1].all()
    used = int((-(-decodes[:number, 1] // decodes[:number, 3])).sum())
    alone = used - int(shared[:, 1].sum())
    assert (owners[:used] < number).all() and (owners[used:] == rows).all()
    assert (rest[:alone] >= 0).all() and (rest[alone:] == -1).all()
    assert field["top_k"].tolist() == [3] * number + [0] * (rows - number)
    torch.testing.assert_close(field["temperatures"], torch.tensor([0.5] * number + [0.0] * (rows - number)))
    there = {name: array.to(DEVICE) for name, array in field.items()}
    plan = paged.graph_plan(
        there["decodes"], there["owners"], there["rest"], there["shared"], there["tables"],
        longest=0, chunk=cuts.chunk,
    )  # fmt: skip
    query = torch.cat((case.query, case.query.new_full((rows + 1 - number, *case.query.shape[1:]), torch.nan)))
    for window in (None, 70):
        out = paged.attend(query, case.keys, case.values, plan, 0.25, window)
        torch.testing.assert_close(out[:number], case.by_reference(0.25, window), rtol=5e-6, atol=5e-6)
        if DEVICE.type == "cpu":  # where what is allocated is poisoned
            assert out[number:].isnan().all()


def test_the_fewer_decodes_the_shorter_their_chunks(monkeypatch):
    monkeypatch.setattr(paged, "SHORT_CHUNKS", {64: 1, 128: 2})
    for contexts, chunk in (([1024], 64), ([1025], 128), ([4096], 128), ([4097], 256), ([512] * 8, 128)):
        assert paged.shortest_chunk(np.array(contexts), 8, 132) == chunk
    assert paged.worth_cutting(130, 130, 8, 132, 64)
    assert not paged.worth_cutting(64, 64, 8, 132, 64)


def test_tiles_follow_from_how_many_programs_there_are_and_in_one_mode_from_nothing():
    plan = paged.plan([1], [5], [[0]], 16, torch.device("cpu"))
    few, many = 3 * 132, 3 * 132 + 1

    def tiles(longest=1000, one_tile=False, **facts):
        step = replace(plan, processors=132, longest=longest, chunk=64, one_tile=one_tile)
        return paged._decode_tiles(step, **{"wide": True, "cut": False, "shares": False, "programs": few} | facts)

    assert tiles() is paged.CUT_TILES and tiles(programs=many) is paged.DECODE_TILES
    assert tiles(wide=False) is paged.FLOAT8_TILES
    for facts in ({}, {"programs": many}, {"wide": False}, {"shares": True}):
        assert tiles(cut=True, **facts) == list(paged.CUT_TILES)
    assert tiles(cut=True, shares=True, programs=many) is paged.DECODE_TILES
    assert tiles(longest=20_000, cut=True, programs=many) is paged.LONG_TILES
    assert tiles(longest=20_000, cut=True, wide=False) is paged.FLOAT8_TILES
    for facts in ({}, {"cut": True}, {"cut": True, "longest": 20_000}, {"programs": many}):
        assert tiles(one_tile=True, **facts) is paged.DECODE_TILES


@pytest.mark.parametrize("chunk", [64, 128])
def test_short_chunks(chunk, monkeypatch):
    case = make_case([1, 1, 1], [200, 64, 330], block_size=64)
    plan = paged.plan(case.query_lens, case.context_lens, case.tables, 64, DEVICE, chunk=chunk)
    assert plan.decodes[:, 3].tolist() == [chunk] * 3
    out = paged.attend(case.query, case.keys, case.values, replace(plan, processors=MANY), 0.25)
    torch.testing.assert_close(out, case.by_reference(0.25, None), rtol=5e-6, atol=5e-6)


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


def test_lists_of_a_plan_lie_alike_whatever_their_lengths():
    for number in range(1, 6):  # or kernels would be compiled anew
        plan = paged.plan([1] * number + [7], [9] * number + [20], [[0, 1]] * (number + 1), 16, DEVICE)
        lists = (plan.decodes, plan.owners, plan.pieces, plan.tables)
        assert [each.storage_offset() * each.element_size() % 16 for each in lists] == [0] * 4
        assert plan.decodes[:, 1].tolist() == [9] * number and plan.pieces[0].tolist()[:3] == [number, 7, 13]
        assert plan.tables.tolist() == [0] * number + [0, 1]

"""The sampler's kernels draw what the reference draws."""

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from nanovllm.ops import sample
from nanovllm.ops.kernels import FUSED
from nanovllm.ops.sample import kernel, reference
from nanovllm.ops.sample.kernel import gumbel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 2000 if DEVICE == "cuda" else 24
VOCAB = 151_936 if DEVICE == "cuda" else 9000
INF = math.inf

SEEDS = [0, 1, -1, -2, 2**31, -(2**31), 2**63 - 1, -(2**63), 123456789]


@pytest.fixture(autouse=True)
def poison_scratch(monkeypatch):
    """Fill what torch.empty returns with what would win, so that a chunk that nobody wrote shows."""
    plain = torch.empty

    def poisoned(*args, **kwargs):
        made = plain(*args, **kwargs)
        return made.fill_(INF if made.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def check_draws(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> None:
    """Equal tokens, but for one row in a thousand where the two best scores nearly tie.

    1e-5: two logarithms, each off by less than 2^-22 of a noise of at most 23.
    """
    tokens = kernel.draw(logits, seeds, positions)
    assert tokens.dtype is torch.int64
    scores = torch.cat([
        (part + reference.gumbel(seed, position, part.shape[1]))
        for part, seed, position in zip(logits.split(100), seeds.split(100), positions.split(100), strict=True)
    ])  # fmt: skip
    expected = scores.argmax(-1)
    different = (tokens != expected).nonzero()[:, 0]
    assert len(different) <= len(tokens) / 1000
    gaps = scores[different, expected[different]] - scores[different, tokens[different]]
    assert bool((gaps <= 1e-5).all())


@triton.jit
def noise_kernel(seeds, positions, out, vocab, FAST: tl.constexpr, BLOCK: tl.constexpr):
    row, token = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = gumbel(tl.load(seeds + row), tl.load(positions + row), token, FAST)
    tl.store(out + row * vocab + token, noise, token < vocab)


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_noise_is_that_of_the_reference(fast):
    vocab, positions = 5000, torch.arange(len(SEEDS), device=DEVICE) * 2**20 - 1
    out = torch.empty(len(SEEDS), vocab, device=DEVICE)
    grid = (len(SEEDS), triton.cdiv(vocab, 1024))
    noise_kernel[grid](ints(*SEEDS), positions, out, vocab, FAST=fast, BLOCK=1024, **FUSED)
    torch.testing.assert_close(out, reference.gumbel(ints(*SEEDS), positions, vocab), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_draws_of_a_full_vocabulary(spread):
    rows = torch.arange(ROWS, device=DEVICE)
    check_draws(torch.randn(ROWS, VOCAB, device=DEVICE) * spread, rows // 7, rows % 7 * 1000)


@pytest.mark.parametrize("vocab", [1, 2, 31, 1023, 1024, 1025, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_draws_of_odd_sizes(vocab, dtype):
    padded = torch.randn(len(SEEDS), vocab + 5, device=DEVICE).to(dtype)
    positions = torch.arange(len(SEEDS), device=DEVICE) * 2**20
    check_draws(padded[:, 3 : vocab + 3], ints(*SEEDS), positions)
    check_draws(padded[:1, 3 : vocab + 3], ints(SEEDS[4]), positions[:1])


def test_a_draw_depends_on_its_row_alone():
    """One row and eight are cut into chunks of different sizes."""
    logits = torch.randn(9, 6000, device=DEVICE)
    positions = torch.arange(9, device=DEVICE)
    together = kernel.draw(logits, ints(*SEEDS), positions)
    alone = [kernel.draw(logits[row : row + 1], ints(SEEDS[row]), positions[row : row + 1]) for row in range(9)]
    assert torch.equal(together, torch.cat(alone))


def test_the_only_token_left_is_drawn():
    logits = torch.full((70, 70), -INF, device=DEVICE)
    logits.fill_diagonal_(-1e4)
    tokens = torch.arange(70, device=DEVICE)
    assert torch.equal(kernel.draw(logits, tokens, tokens), tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (2, 31), (3, 1025), (9, 4097), (2, 9000)])
def test_greedy_takes_the_lowest_id_on_a_tie(rows, vocab, dtype):
    logits = torch.randn(rows, vocab + 3, device=DEVICE).clamp(max=0.5).to(dtype)[:, 1 : vocab + 1]
    best = logits.max(-1).values
    expected = [row.index(top) for row, top in zip(logits.tolist(), best.tolist(), strict=True)]
    assert kernel.greedy(logits).tolist() == expected


def test_extreme_rows():
    logits = torch.zeros(5, 2000, device=DEVICE)
    logits[0] = -INF
    logits[1, 1500] = torch.nan
    logits[2, 1999] = INF
    logits[3, :1024] = -INF
    assert kernel.greedy(logits).tolist() == [0, -1, 1999, 1024, 0]
    drawn = kernel.draw(logits, ints(1, 2, 3, 4, 5), ints(1, 2, 3, 4, 5)).tolist()
    assert drawn[:3] == [0, -1, 1999]
    assert 1024 <= drawn[3] < 2000


# Filters

# Settings of rows: temperature, top_k, top_p, min_p
FILTERS = [
    (0.7, 5, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1), (0.5, 50, 0.8, 0.0), (1.5, 7, 0.5, 0.2),
    (1.0, 0, 0.95, 0.01), (1.0, 1, 1.0, 0.0), (0.3, 10**9, 1e-6, 0.0), (2.0, 600, 0.9999, 0.0),
    (1.0, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.1), (0.01, 0, 0.5, 0.0),
]  # fmt: skip


def settings(kinds: list[tuple]) -> list[torch.Tensor]:
    columns = zip(*kinds, strict=True)
    return [
        torch.tensor(column, dtype=torch.int32 if place == 1 else torch.float32, device=DEVICE)
        for place, column in enumerate(columns)
    ]


def check_filters(logits: torch.Tensor, kinds: list[tuple]) -> None:
    """Equal sets, but where the share above a value comes within 1e-5 of top_p: sums of float32 differ by less."""
    values = settings(kinds)
    found = kernel.lowest_kept(logits, *values)
    greedy = values[0] == 0
    assert bool((found[greedy] == -INF).all())
    temperatures = values[0].clamp(min=1e-3)
    expected = reference.lowest_kept(logits, temperatures, *values[1:]).where(~greedy, -INF)
    kept, wanted = logits >= found[:, None], logits >= expected[:, None]
    for row in ((kept != wanted) & (logits > -INF)).any(-1).nonzero()[:, 0].tolist():
        only = [value[row : row + 1] for value in (temperatures, *values[1:])]
        floor = reference.lowest_kept(logits[row : row + 1], only[0], only[1], torch.ones_like(only[2]), only[3])
        line = logits[row][kept[row] != wanted[row]].max()
        weights = (logits[row].double() / only[0]).softmax(-1)
        share = weights[logits[row] > line].sum() / weights[logits[row] >= floor].sum()
        assert abs(float(share - only[2])) < 1e-5, kinds[row]


@pytest.fixture(params=[kernel.FEW, kernel.MANY], ids=["few rows", "many rows"])
def plan(request, monkeypatch):
    """What is done for few rows and for many, however many there are."""
    monkeypatch.setattr(kernel, "FEW", request.param)
    monkeypatch.setattr(kernel, "MANY", request.param)


@pytest.mark.parametrize("vocab", [1, 61, 1000, 5003] if DEVICE == "cuda" else [1, 61, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_filters_keep_what_the_reference_keeps(vocab, dtype, monkeypatch):
    monkeypatch.setattr(kernel, "FEW_ROWS", 0)
    padded = torch.randn(len(FILTERS), vocab + 5, device=DEVICE).to(dtype) * 2
    check_filters(padded[:, 3 : vocab + 3], FILTERS)


@pytest.mark.parametrize("shift", [0.0, -30.0, 12.0])
def test_filters_of_several_chunks(shift, plan):
    kinds = [FILTERS[0], FILTERS[4], FILTERS[5]]
    check_filters((torch.randn(3, 20_001, device=DEVICE) * 3 + shift).bfloat16(), kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_ties_at_the_line_stays(dtype, plan):
    logits = (torch.randn(4, 300, device=DEVICE) * 2).round().to(dtype)
    logits[:, ::2] *= -1  # zeros of both signs
    check_filters(logits, [(1.0, 90, 1.0, 0.0), (1.0, 0, 0.7, 0.0), (1.0, 40, 0.9, 0.0), (1.0, 0, 1.0, 0.05)])
    lonely = torch.full((2, 40), -0.0, device=DEVICE, dtype=dtype)
    lonely[:, 7] = 0.0
    assert bool(
        (lonely >= kernel.lowest_kept(lonely, *settings([(1.0, 1, 1.0, 0.0), (1.0, 2, 0.5, 0.0)]))[:, None]).all()
    )


def test_filters_where_tokens_are_missing(plan):
    logits = torch.full((3, 500), -INF, device=DEVICE)
    logits[0, 33] = -7.0
    logits[1, :20] = torch.randn(20, device=DEVICE)
    check_filters(logits, [(1.0, 5, 0.9, 0.1), (1.0, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_passes_that_were_not_planned_are_made(dtype, monkeypatch):
    """A line near 0 between values far apart: the first passes, which go by value, find next to nothing."""
    logits = torch.randn(3, 400, device=DEVICE) * 1e-20
    logits[:, :2] = torch.tensor([-3e4, 3.0], device=DEVICE)
    kinds = [(1.0, 0, 0.99, 0.0), (1.0, 200, 1.0, 0.0), (1.0, 200, 0.99, 0.0)]
    for planned in (1, 10):
        monkeypatch.setattr(kernel, "FEW", (4, 2, planned))
        check_filters(logits.to(dtype), kinds)


def test_a_row_is_filtered_as_if_it_were_alone(monkeypatch):
    """Bit for bit, and whatever the pivots are: the sums that decide are made in one order."""
    logits = torch.randn(len(FILTERS), 9000, device=DEVICE).bfloat16()
    values = settings(FILTERS)
    monkeypatch.setattr(kernel, "FEW_ROWS", 2)
    together = kernel.lowest_kept(logits, *values)
    for row in (1, 3, 4, 8):
        alone = kernel.lowest_kept(logits[row : row + 1], *(value[row : row + 1] for value in values))
        kept = logits[row] >= alone
        assert torch.equal(kept, logits[row] >= together[row])


def check_choices(logits: torch.Tensor, kinds: list[tuple], *, filtered: bool, wrong: int = 0) -> None:
    rows = torch.arange(len(logits), device=DEVICE)
    values = [*settings(kinds), rows * 7 - 3, rows * 1000]
    found = kernel.choose(logits, *values, filtered=filtered)
    assert found.dtype is torch.int64
    assert int((found != reference.choose(logits, *values, filtered=filtered)).sum()) <= wrong
    greedy = values[0] == 0
    assert torch.equal(found[greedy], logits[greedy].float().argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_choices(dtype):
    logits = torch.randn(len(FILTERS), 1100, device=DEVICE).to(dtype)[:, 50:1050]
    check_choices(logits, FILTERS, filtered=True)
    kinds = [(temperature, 0, 1.0, 0.0) for temperature, *_ in FILTERS]
    check_choices(logits, kinds, filtered=False)
    check_choices(logits[:2], kinds[-2:], filtered=False)


def test_choices_of_extreme_rows():
    logits = torch.zeros(5, 2000, device=DEVICE)
    logits[0] = -INF
    logits[1, 1500] = torch.nan
    logits[2, 1999] = INF
    logits[3, :1024] = -INF
    seeds = torch.arange(5, device=DEVICE)
    for kind in ((1.0, 5, 0.9, 0.1), (0.0, 5, 0.9, 0.1)):
        found = kernel.choose(logits, *settings([kind] * 5), seeds, seeds, filtered=True).tolist()
        assert found[:3] == [0, -1, 1999]
        assert 1024 <= found[3] < 2000


@pytest.fixture
def lists(monkeypatch):
    """What rows were listed for a search, call by call."""
    found = []
    plain = kernel._search

    def search(logits, settings, drawn, listed, count, lowest):
        found.append(sorted(listed[: int(count)].tolist()))
        plain(logits, settings, drawn, listed, count, lowest)

    monkeypatch.setattr(kernel, "_search", search)
    return found


@pytest.mark.parametrize("kind", [(0.9, 0, 0.6, 0.0), (1.0, 300, 1.0, 0.0), (0.8, 0, 1.0, 0.05), (1.0, 0, 0.8, 0.001)])
def test_only_rows_whose_first_draw_is_dropped_are_searched(kind, lists):
    rows = torch.arange(12, device=DEVICE)
    logits = torch.randn(12, 700, device=DEVICE).bfloat16()
    values = settings([kind] * 12)
    free = settings([(kind[0], 0, 1.0, 0.0)] * 12)
    found = kernel.choose(logits, *values, rows, rows, filtered=True)
    first = kernel.choose(logits, *free, rows, rows, filtered=False)
    dropped = logits.gather(1, first[:, None])[:, 0] < reference.lowest_kept(logits, *values)
    assert lists == [dropped.nonzero()[:, 0].tolist()] and 0 < int(dropped.sum()) < 12
    assert torch.equal(found == first, ~dropped)
    assert torch.equal(found, reference.choose(logits, *values, rows, rows, filtered=True))


def test_both_limits_and_rows_that_filter_nothing(lists):
    kinds = [(1.0, 40, 0.9, 0.0), (0.0, 40, 0.9, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 700, 1.0, 0.0), (1.0, 701, 1.0, 0.0)]
    check_choices(torch.randn(5, 700, device=DEVICE), kinds, filtered=True)
    assert lists == [[0]]


def test_the_last_token_that_is_kept_needs_no_search(lists):
    logits = torch.randn(3, 100, device=DEVICE)
    logits[:, 77] = 60.0
    check_choices(logits, [(1.0, 1, 1.0, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 0, 1.0, 1.0)], filtered=True)
    assert lists == [[]]


def test_a_filtered_choice_sees_its_own_row_alone(monkeypatch):
    monkeypatch.setattr(kernel, "FEW_ROWS", 2)
    kinds = [FILTERS[place] for place in (1, 4, 5, 9, 10)]
    rows = torch.arange(len(kinds), device=DEVICE)
    values = [*settings(kinds), rows, rows * 3]
    logits = torch.randn(len(kinds), 8300, device=DEVICE).bfloat16()
    together = kernel.choose(logits, *values, filtered=True)
    for row in (0, 2):
        alone = kernel.choose(logits[row : row + 1], *(value[row : row + 1] for value in values), filtered=True)
        assert int(alone) == int(together[row])


def test_more_listed_work_than_programs(monkeypatch):
    monkeypatch.setattr(kernel, "MOST_PROGRAMS", 3)
    check_choices(torch.randn(9, 9000, device=DEVICE).bfloat16(), [(1.0, 5, 1.0, 0.0)] * 9, filtered=True)


# Log-probabilities


@pytest.mark.parametrize("number", [0, 1, 5, 20])
@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float32), (61, torch.float16), (9003, torch.bfloat16)])
def test_log_probs_are_those_of_the_reference(vocab, dtype, number):
    logits = torch.randn(4, vocab + 3, device=DEVICE).to(dtype)[:, 1 : vocab + 1]
    tokens = torch.tensor([0, vocab - 1, vocab // 2, int(logits[3].argmax())], device=DEVICE)
    given = torch.arange(8, device=DEVICE).view(4, 2) % vocab
    own, ranks, values, ids, named = kernel.log_probs(logits, tokens, number, given)
    expected = reference.log_probs(logits, tokens, number, given)
    torch.testing.assert_close(named, expected[4], rtol=0, atol=2e-6 * 16)
    bare = kernel.log_probs(logits, tokens, number, given, normalized=False)
    wanted = reference.log_probs(logits, tokens, number, given, normalized=False)
    assert all(torch.equal(bare[place], wanted[place]) for place in (0, 1, 2, 4)) and torch.equal(bare[3], ids)
    torch.testing.assert_close((own, values), (expected[0], expected[2]), rtol=0, atol=2e-6 * 16)
    assert torch.equal(ranks, expected[1])
    # of equals the lowest id first
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(ids, order[:, : min(number, vocab)])


def test_log_probs_of_missing_tokens():
    logits = torch.full((2, 70), -INF, device=DEVICE)
    logits[0, 5] = 2.0
    logits[1] = torch.tensor([-0.0, 0.0], device=DEVICE).repeat(35)
    own, ranks, values, ids, _ = kernel.log_probs(logits, ints(3, 9), 3)
    assert own.tolist() == pytest.approx([-INF, -math.log(70)])
    assert ranks.tolist() == [2, 1]
    assert ids.tolist() == [[5, 0, 1], [0, 1, 2]]
    assert values[0].tolist() == [0.0, -INF, -INF]


def test_log_probs_of_a_row_alone():
    logits = torch.randn(5, 9000, device=DEVICE).bfloat16()
    together = kernel.log_probs(logits, ints(1, 2, 3, 4, 5), 2)
    alone = kernel.log_probs(logits[3:4], ints(4), 2)
    for whole, part in zip(together, alone, strict=True):
        assert torch.equal(whole[3:4], part)


# The whole vocabulary of Qwen3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 15, 16, 120])
@pytest.mark.parametrize(("spread", "shift"), [(1.0, 0.0), (0.02, 0.0), (3.0, 8.0)])
def test_filters_of_a_full_vocabulary(rows, dtype, spread, shift):
    logits = (torch.randn(rows, VOCAB, device=DEVICE) * spread + shift).to(dtype)
    for turn in range(1 if rows > 15 else 4):
        kinds = [FILTERS[(row + 3 * turn) % len(FILTERS)] for row in range(rows)]
        check_filters(logits, kinds)
        check_choices(logits, kinds, filtered=True, wrong=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_full_vocabulary_alone_and_among_others(dtype):
    logits = (torch.randn(120, VOCAB, device=DEVICE) * 2).to(dtype)
    values = settings([FILTERS[row % len(FILTERS)] for row in range(120)])
    together = kernel.lowest_kept(logits, *values)
    for row in range(60):
        alone = kernel.lowest_kept(logits[row : row + 1], *(value[row : row + 1] for value in values))
        assert torch.equal(logits[row] >= alone, logits[row] >= together[row])
    tokens = logits.argmax(-1)
    whole = kernel.log_probs(logits, tokens, 5)
    part = kernel.log_probs(logits[7:8], tokens[7:8], 5)
    assert all(torch.equal(one[7:8], other) for one, other in zip(whole, part, strict=True))


@pytest.mark.gpu
def test_filtered_draws_follow_the_softmax_of_what_is_left():
    draws, vocab = 100_000, 32
    row = torch.randn(1, vocab, device=DEVICE)
    kind = (0.8, 12, 0.9, 0.02)
    numbers = torch.arange(draws, device=DEVICE)
    tokens = kernel.choose(row.expand(draws, -1), *settings([kind] * draws), numbers, numbers % 17, filtered=True)
    lowest = reference.lowest_kept(row, *settings([kind]))
    expected = (row / kind[0]).masked_fill(row < lowest, -INF).double().softmax(-1)[0] * draws
    counts = torch.bincount(tokens, minlength=vocab)
    assert not bool(counts[expected == 0].any())
    filled = expected > 0
    statistic = float(((counts - expected)[filled] ** 2 / expected[filled]).sum())
    freedom = int(filled.sum()) - 1
    assert statistic < freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.gpu
def test_log_probs_of_a_full_vocabulary():
    logits = torch.randn(120, VOCAB, device=DEVICE) * 3
    tokens = torch.randint(VOCAB, (120,), device=DEVICE)
    for number in (0, 5, 20):
        found, expected = kernel.log_probs(logits, tokens, number), reference.log_probs(logits, tokens, number)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_the_front_doors_take_the_kernels(monkeypatch):
    for name in ("choose", "log_probs"):
        monkeypatch.setattr(reference, name, None)
    logits, rows = torch.randn(2, 50, device=DEVICE), torch.arange(2, device=DEVICE)
    sample.choose(logits, *settings(FILTERS[:2]), rows, rows, filtered=True)
    sample.log_probs(logits, rows, 3)


@pytest.mark.gpu
def test_choices_and_log_probs_can_be_recorded():
    """Nothing waits for the host, and another step's numbers in the same places are enough for another result."""
    logits = torch.randn(16, VOCAB, device=DEVICE).bfloat16()
    kinds = [FILTERS[row % len(FILTERS)] for row in range(16)]
    rows = torch.arange(16, device=DEVICE)
    values = [*settings(kinds), rows * 3, rows.clone()]

    def step():
        tokens = kernel.choose(logits, *values, filtered=True)
        return tokens, *kernel.log_probs(logits, tokens, 5)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for turn in range(3):
        logits.normal_()
        values[-1] += turn
        for value, other in zip(values, settings(kinds[turn:] + kinds[:turn]), strict=False):
            value.copy_(other)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(recorded, step(), strict=True))


def test_no_rows():
    none = torch.zeros(0, device=DEVICE)
    assert kernel.lowest_kept(torch.zeros(0, 5, device=DEVICE), none, none.int(), none, none).shape == (0,)
    assert [len(each) for each in kernel.log_probs(torch.zeros(0, 5, device=DEVICE), ints(), 3)] == [0] * 5
    assert kernel.greedy(torch.zeros(0, 5, device=DEVICE)).shape == (0,)
    assert kernel.draw(torch.zeros(0, 5, device=DEVICE), ints(), ints()).shape == (0,)


def test_log_probs_beside_a_row_that_gave_no_token():
    logits = torch.randn(3, 9000, device=DEVICE)
    tokens = torch.tensor([-1, 5, 8999], device=DEVICE)
    given = torch.tensor([[1], [2], [3]], device=DEVICE)
    expected = kernel.log_probs(logits[1:], tokens[1:], 4, given[1:])
    logits[0, 17] = torch.nan
    for found, alone in zip(kernel.log_probs(logits, tokens, 4, given), expected, strict=True):
        assert torch.equal(found[1:], alone)

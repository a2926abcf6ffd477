"""Drawing tokens: exact support of the filters, the right distribution, and noise that nothing but
(seed, position, token) decides.

Statistical bounds are at one in a million or at six standard deviations, with fixed seeds: a red test means a fault.
"""

import math

import pytest
import torch

from nanovllm.ops.sample import draw, greedy, keep_top_k, keep_top_p
from nanovllm.ops.sample.reference import PREFIX, gumbel

ALPHA = 1e-6
SIGMAS = 6.0
INF = math.inf


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def kept(logits: torch.Tensor) -> list[list[int]]:
    """Which tokens of each row are left; checks that a filter changes no score that it keeps."""
    return [[token for token, score in enumerate(row) if score > -INF] for row in logits.tolist()]


# Greedy


def test_greedy_takes_the_best_and_the_lowest_id_on_a_tie():
    logits = torch.tensor(
        [[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-INF, -INF, -1e4, -INF], [-1.0, -2.0, 0.0, -0.0]]
    )
    assert greedy(logits).tolist() == [1, 0, 2, 2]


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000, 49_152])
def test_greedy_ties_anywhere(vocab):
    torch.manual_seed(vocab)
    for _ in range(20):
        logits = torch.randn(3, vocab).clamp(max=0.5)  # many tokens share the maximum
        best = logits.max(-1).values
        assert greedy(logits).tolist() == [
            row.tolist().index(top) for row, top in zip(logits, best.tolist(), strict=True)
        ]


def test_greedy_of_no_rows():
    assert greedy(torch.empty(0, 5)).shape == (0,)


# Filters


def top_k_by_hand(row: list[float], k: int) -> list[int]:
    if k <= 0 or k >= len(row):
        return [token for token, score in enumerate(row) if score > -INF]
    threshold = sorted(row, reverse=True)[k - 1]
    return [token for token, score in enumerate(row) if score >= threshold and score > -INF]


def top_p_by_hand(row: list[float], p: float) -> list[int]:
    top = max(row)
    weights = [math.exp(score - top) for score in row]
    shares = [weight / sum(weights) for weight in weights]
    total, threshold = 0.0, 0.0
    for share in sorted(shares, reverse=True):
        total, threshold = total + share, share
        if total >= p:
            break
    return [token for token, share in enumerate(shares) if share >= threshold and row[token] > -INF]


@pytest.mark.parametrize("vocab", [1, 2, 7, 100])
def test_top_k_keeps_exactly_the_best(vocab):
    torch.manual_seed(vocab)
    sizes = [0, 1, 2, 3, vocab - 1, vocab, vocab + 1, 10**9]
    logits = torch.randn(len(sizes), vocab)
    out = keep_top_k(logits, ints(*sizes))
    assert kept(out) == [top_k_by_hand(row, k) for row, k in zip(logits.tolist(), sizes, strict=True)]
    assert torch.equal(out[out > -INF], logits[out > -INF])


def test_top_k_keeps_what_ties_with_the_last():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]]).repeat(4, 1)
    assert kept(keep_top_k(logits, ints(1, 2, 3, 5))) == [[1], [0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4]]


def test_top_k_of_tokens_that_are_banned_already():
    assert kept(keep_top_k(torch.tensor([[-INF, 1.0, -INF, 0.0]]), ints(3))) == [[1, 3]]


def test_filters_of_no_rows():
    assert keep_top_k(torch.empty(0, 5), ints()).shape == (0, 5)
    assert keep_top_p(torch.empty(0, 5), torch.empty(0)).shape == (0, 5)


def test_top_p_at_exact_probabilities():
    """Shares of 1/2, 1/4, 1/8, 1/8: the token that crosses the line stays, and what ties with it too."""
    logits = torch.tensor([8.0, 2.0, 4.0, 2.0]).log()
    wanted = {
        1e-9: [0],
        0.5: [0],
        0.51: [0, 2],
        0.75: [0, 2],
        0.76: [0, 1, 2, 3],
        0.99: [0, 1, 2, 3],
        1.0: [0, 1, 2, 3],
    }
    out = keep_top_p(logits.repeat(len(wanted), 1), torch.tensor(list(wanted)))
    assert kept(out) == list(wanted.values())


@pytest.mark.parametrize("vocab", [1, 3, 50, 3 * PREFIX])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_top_p_keeps_exactly_the_best(vocab, spread):
    torch.manual_seed(vocab)
    shares = [1e-12, 0.1, 0.301, 0.5001, 0.7, 0.95, 0.999, 1.0]
    logits = torch.randn(len(shares), vocab) * spread
    out = keep_top_p(logits, torch.tensor(shares))
    for row, p, found in zip(logits.tolist(), torch.tensor(shares).tolist(), kept(out), strict=True):
        # float32 sums may cross the line one token earlier or later where they come within 1e-6 of it
        assert found in [top_p_by_hand(row, near) for near in (p, p - 1e-6, min(p + 1e-6, 1.0))]
    assert torch.equal(out[out > -INF], logits[out > -INF])
    assert torch.equal(out[-1], logits[-1])


def test_top_p_may_need_more_than_the_first_look():
    logits = torch.zeros(2, 4 * PREFIX)
    logits[:, :PREFIX] += 1e-3  # nearly flat: half of the probability lies far behind the first look
    out = keep_top_p(logits, torch.tensor([0.1, 0.9]))
    assert kept(out) == [list(range(PREFIX)), list(range(4 * PREFIX))]


def test_filters_follow_each_other():
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log()
    two = keep_top_k(logits, ints(2))
    assert kept(keep_top_p(two, torch.tensor([0.6]))) == [[0]]  # 2/3 of what top-k has left, 1/2 of all
    assert kept(keep_top_p(logits, torch.tensor([0.6]))) == [[0, 1]]


def test_a_row_without_limits_is_left_alone_beside_one_with():
    torch.manual_seed(0)
    logits = torch.randn(3, 40)
    out = keep_top_p(keep_top_k(logits, ints(0, 5, 0)), torch.tensor([1.0, 1.0, 0.5]))
    assert torch.equal(out[0], logits[0])
    assert len(kept(out)[1]) == 5
    assert kept(out)[2] == top_p_by_hand(logits[2].tolist(), 0.5)


# Distribution


def chi_square(tokens: torch.Tensor, logits: torch.Tensor) -> float:
    """The probability of counts at least this far from the softmax; cells that expect under 10 are merged."""
    expected = logits.double().softmax(-1) * len(tokens)
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    assert not counts[expected == 0].any(), "a token of probability 0 was drawn"
    small = expected < 10
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    counts = torch.cat((counts[~small], counts[small].sum()[None]))
    filled = expected > 0
    statistic = ((counts - expected)[filled] ** 2 / expected[filled]).sum()
    freedom = torch.tensor((int(filled.sum()) - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


DRAWS = 100_000


def draws(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return draw(logits.expand(len(seeds), -1), seeds, positions)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("varied", ["positions", "seeds", "both"])
def test_draws_follow_the_softmax(varied, temperature):
    torch.manual_seed(7)
    logits = torch.randn(32) * 1.5
    numbers, one = torch.arange(DRAWS), torch.full((DRAWS,), 5)
    seeds, positions = {
        "positions": (one, numbers), "seeds": (numbers, one), "both": (numbers // 300, numbers % 300)
    }[varied]  # fmt: skip
    tokens = draws(logits / temperature, seeds, positions)
    assert chi_square(tokens, logits / temperature) > ALPHA


def test_a_temperature_five_percent_off_would_be_seen():
    torch.manual_seed(7)
    logits = torch.randn(32) * 1.5
    tokens = draws(logits / 1.05, torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS))
    assert chi_square(tokens, logits) < ALPHA


def test_filtered_draws_follow_the_softmax_of_what_is_left():
    torch.manual_seed(8)
    logits = keep_top_p(keep_top_k(torch.randn(1, 32), ints(12)), torch.tensor([0.9]))[0]
    tokens = draws(logits, torch.arange(DRAWS), torch.arange(DRAWS) % 17)
    assert sorted(set(tokens.tolist())) == kept(logits[None])[0]
    assert chi_square(tokens, logits) > ALPHA


def test_neighbouring_draws_are_independent():
    """Counts of pairs against the product of the shares, over positions, over seeds, and over both."""
    torch.manual_seed(9)
    logits = torch.randn(5)
    pairs = (logits[:, None] + logits).flatten()
    numbers = torch.arange(DRAWS)
    for seed_step, position_step in ((0, 1), (1, 0), (1, 1), (1, -1), (0, 2**20)):
        first = draws(logits, numbers * 3, numbers % 1000)
        second = draws(logits, numbers * 3 + seed_step, numbers % 1000 + position_step)
        assert chi_square(first * 5 + second, pairs) > ALPHA


def test_noise_of_neighbours_is_uncorrelated():
    seeds, positions, vocab = 40, 40, 300
    grid = torch.arange(seeds * positions)
    noise = gumbel(grid // positions, grid % positions, vocab).double().view(seeds, positions, vocab)
    noise = (noise - noise.mean()) / noise.std()
    views = {
        "token": (noise[:, :, 1:], noise[:, :, :-1]),
        "position": (noise[:, 1:], noise[:, :-1]),
        "seed": (noise[1:], noise[:-1]),
        "seed and position": (noise[1:, 1:], noise[:-1, :-1]),
        "seed against position": (noise[1:, :-1], noise[:-1, 1:]),
        "position and token": (noise[:, 1:, 1:], noise[:, :-1, :-1]),
    }
    for name, (left, right) in views.items():
        assert abs(float((left * right).mean())) < SIGMAS / left.numel() ** 0.5, name


def test_no_row_of_noise_is_another_one_shifted():
    """Tokens are hashed by adding a step for each; one word of key alone would make some rows pieces of others."""
    rows, vocab = 8000, 1000
    bits = gumbel(torch.arange(rows), torch.full((rows,), 3), vocab).view(torch.int32).to(torch.int64)
    triples = (bits[:, :-2] * (0x9E3779B97F4A7C15 - 2**64) + bits[:, 1:-1]) * (0x94D049BB133111EB - 2**64) + bits[:, 2:]
    ordered = triples.flatten().sort().values
    assert not bool((ordered[1:] == ordered[:-1]).any())


def test_noise_is_gumbel_even_far_out():
    """Shares beyond x against 1 - exp(-exp(-x)): in the bulk, and where one in a million decides a large vocabulary."""
    vocab, rows = 151_936, 32
    noise = gumbel(torch.arange(rows), torch.full((rows,), 11), vocab)
    assert noise.isfinite().all()
    number = noise.numel()
    for x in (-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 9.0, 11.0, 13.0):
        share = -math.expm1(-math.exp(-x))
        bound = SIGMAS * (number * share * (1 - share)) ** 0.5
        assert abs(int((noise > x).sum()) - number * share) < bound, x
    assert abs(float(noise.double().mean()) - 0.5772156649) < SIGMAS * math.pi / 6**0.5 / number**0.5
    assert abs(float(noise.double().var()) - math.pi**2 / 6) < 0.01


def test_draws_from_a_full_vocabulary():
    torch.manual_seed(10)
    vocab = 151_936
    logits = torch.randn(64, vocab)
    tokens = draw(logits, torch.arange(64), torch.arange(64))
    assert len(set(tokens.tolist())) > 55  # nearly flat: few of 64 draws coincide
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < vocab


# What decides the noise

SEEDS = [0, 1, -1, -2, 2**31, -(2**31), 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64, 123456789]


def test_noise_depends_on_seed_position_and_token_alone():
    seeds, positions = ints(*SEEDS), torch.arange(len(SEEDS)) * 7
    whole = gumbel(seeds, positions, 500)
    order = torch.randperm(len(SEEDS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(seeds[order], positions[order], 500), whole[order])
    for row in range(len(SEEDS)):
        assert torch.equal(gumbel(seeds[row : row + 1], positions[row : row + 1], 500)[0], whole[row])
        assert torch.equal(gumbel(seeds[row : row + 1], positions[row : row + 1], 33)[0], whole[row, :33])


def test_every_seed_and_position_has_noise_of_its_own():
    rows = [(seed, position) for seed in SEEDS for position in (0, 1, 2, 1000, 2**20)]
    noise = gumbel(ints(*[seed for seed, _ in rows]), ints(*[position for _, position in rows]), 40)
    assert noise.isfinite().all()
    same = [
        (rows[left], rows[right])
        for left in range(len(rows)) for right in range(left) if torch.equal(noise[left], noise[right])
    ]  # fmt: skip
    # one word is made of both: seed 0 at position p + 1 and seed PHI at position p are one and the same
    phi = 0x9E3779B97F4A7C15 - 2**64
    assert all({left[0], right[0]} == {0, phi} for left, right in same)


def test_the_torch_generators_are_not_touched():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    draw(torch.zeros(2, 9), ints(1, 2), ints(3, 4))
    assert torch.equal(torch.rand(1), expected)


def test_the_same_call_draws_the_same():
    torch.manual_seed(4)
    logits, seeds, positions = torch.randn(50, 64), torch.arange(50) - 25, torch.arange(50)
    assert torch.equal(draw(logits, seeds, positions), draw(logits.clone(), seeds.clone(), positions.clone()))


# Extremes


def test_extreme_scores():
    logits = torch.full((4, 6), -INF)
    logits[0, 3] = 0.0  # one token left
    logits[1] = torch.tensor([1e4, -1e4, -1e4, 1e4, -1e4, -1e4])
    logits[2, 5] = -1e4
    logits[3] = torch.tensor([-3e38, 3e38, 0.0, 0.0, 0.0, 0.0])
    for seed in range(50):
        tokens = draw(logits, torch.full((4,), seed), torch.arange(4)).tolist()
        assert tokens[0] == 3
        assert tokens[1] in (0, 3)
        assert tokens[2:] == [5, 1]


def test_a_falling_temperature_tends_to_greedy():
    torch.manual_seed(5)
    logits = torch.randn(200, 32)
    agree = [
        float((draw(logits / temperature, torch.arange(200), torch.arange(200)) == greedy(logits)).float().mean())
        for temperature in (1.0, 0.1, 0.01)
    ]
    assert agree == sorted(agree)
    assert agree[-1] > 0.95


def test_a_row_of_nan_stays_inside_the_vocabulary_and_harms_no_other():
    torch.manual_seed(6)
    logits = torch.randn(3, 20)
    seeds, positions = ints(1, 2, 3), ints(4, 5, 6)
    clean = draw(keep_top_p(keep_top_k(logits, ints(5, 5, 5)), torch.full((3,), 0.8)), seeds, positions)
    logits[1] = torch.nan
    tokens = draw(keep_top_p(keep_top_k(logits, ints(5, 5, 5)), torch.full((3,), 0.8)), seeds, positions)
    assert tokens[[0, 2]].tolist() == clean[[0, 2]].tolist()
    assert 0 <= int(tokens[1]) < 20

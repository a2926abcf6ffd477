"""Drawing tokens: exact support of the filters, the right distribution, and noise that nothing but
(seed, position, token) decides.

Statistical bounds are at one in a million or at six standard deviations, with fixed seeds: a red test means a fault.
"""

import math

import pytest
import torch

from nanovllm.ops.sample import choose, draw, greedy, log_probs, processed
from nanovllm.ops.sample.reference import PREFIX, gumbel, lowest_kept

ALPHA = 1e-6
SIGMAS = 6.0
INF = math.inf


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


OFF = {"temperatures": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def settings(rows: int, **changes: object) -> dict[str, torch.Tensor]:
    """The tensors that ``choose`` wants, from numbers for all rows or lists of one for each; the rest is off."""
    return {
        name: torch.as_tensor(value, dtype=torch.int32 if name == "top_k" else torch.float32).expand(rows)
        for name, value in (OFF | changes).items()
    }


def left(logits: torch.Tensor, **changes: object) -> torch.Tensor:
    """The logits with what the filters drop at -inf."""
    lowest = lowest_kept(logits, **settings(len(logits), **changes))
    assert lowest.dtype is torch.float32
    return logits.masked_fill(logits < lowest[:, None], -INF)


def kept(logits: torch.Tensor, **changes: object) -> list[list[int]]:
    """Which tokens of each row are left."""
    return [[token for token, score in enumerate(row) if score > -INF] for row in left(logits, **changes).tolist()]


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
    assert kept(logits, top_k=sizes) == [top_k_by_hand(row, k) for row, k in zip(logits.tolist(), sizes, strict=True)]


def test_top_k_keeps_what_ties_with_the_last():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]]).repeat(4, 1)
    assert kept(logits, top_k=[1, 2, 3, 5]) == [[1], [0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4]]


def test_top_k_of_tokens_that_are_banned_already():
    assert kept(torch.tensor([[-INF, 1.0, -INF, 0.0]]), top_k=3) == [[1, 3]]


def test_filters_of_no_rows():
    assert lowest_kept(torch.empty(0, 5), **settings(0, top_k=2, top_p=0.5, min_p=0.1)).shape == (0,)


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
    assert kept(logits.repeat(len(wanted), 1), top_p=list(wanted)) == list(wanted.values())


@pytest.mark.parametrize("vocab", [1, 3, 50, 3 * PREFIX])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_top_p_keeps_exactly_the_best(vocab, spread):
    torch.manual_seed(vocab)
    shares = [1e-12, 0.1, 0.301, 0.5001, 0.7, 0.95, 0.999, 1.0]
    logits = torch.randn(len(shares), vocab) * spread
    for row, p, found in zip(logits.tolist(), torch.tensor(shares).tolist(), kept(logits, top_p=shares), strict=True):
        # float32 sums may cross the line one token earlier or later where they come within 1e-6 of it
        assert found in [top_p_by_hand(row, near) for near in (p, p - 1e-6, min(p + 1e-6, 1.0))]


def test_top_p_may_need_more_than_the_first_look():
    logits = torch.zeros(2, 4 * PREFIX)
    logits[:, :PREFIX] += 1e-3  # nearly flat: half of the probability lies far behind the first look
    assert kept(logits, top_p=[0.1, 0.9]) == [list(range(PREFIX)), list(range(4 * PREFIX))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_min_p_is_a_share_of_the_best(dtype):
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log().to(dtype).repeat(5, 1)
    assert kept(logits, min_p=[0.0, 0.1, 0.2, 0.4, 1.0]) == [
        [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2], [0, 1], [0],
    ]  # fmt: skip
    assert kept(logits[:3], min_p=0.1, temperatures=[0.5, 1.0, 2.0]) == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_filters_follow_each_other():
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log()
    assert kept(logits, top_k=2, top_p=0.6) == [[0]]  # 2/3 of what top-k has left, 1/2 of all
    assert kept(logits, top_p=0.6) == [[0, 1]]
    assert kept(logits, min_p=0.2, top_p=0.9) == [[0, 1, 2]]  # 12/14 are not enough; of all, 14/16 would not be either
    assert kept(logits, min_p=0.4, top_p=0.6) == [[0]]  # 2/3 of what min-p has left
    assert kept(logits, min_p=0.2, top_k=2) == kept(logits, min_p=0.4, top_k=4) == [[0, 1]]


def test_a_filter_sees_the_temperature():
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log().repeat(2, 1)
    assert kept(logits, top_p=0.6, temperatures=[0.5, 2.0]) == [[0], [0, 1, 2]]  # 64 of 86; roots: 6.24 of 8.24
    assert kept(logits, top_k=2, temperatures=[0.5, 2.0]) == [[0, 1], [0, 1]]


def test_a_row_without_limits_is_left_alone_beside_one_with():
    torch.manual_seed(0)
    logits = torch.randn(4, 40)
    found = kept(logits, top_k=[0, 5, 0, 0], top_p=[1.0, 1.0, 0.5, 1.0], min_p=[0.0, 0.0, 0.0, 1.0])
    assert found[0] == list(range(40))
    assert len(found[1]) == 5
    assert found[2] == top_p_by_hand(logits[2].tolist(), 0.5)
    assert found[3] == [int(logits[3].argmax())]


# Choice


def test_a_choice_is_the_draw_from_what_is_left():
    torch.manual_seed(2)
    logits, seeds, positions = torch.randn(40, 50), torch.arange(40), torch.arange(40) % 7
    changes = {"temperatures": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01}
    scaled = left(logits, **changes) / torch.tensor(0.7)
    found = choose(logits, **settings(40, **changes), seeds=seeds, positions=positions, filtered=True)
    assert torch.equal(found, draw(scaled, seeds, positions))
    found = choose(logits, **settings(40, temperatures=0.7), seeds=seeds, positions=positions, filtered=False)
    assert torch.equal(found, draw(logits / torch.tensor(0.7), seeds, positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_choice_sees_its_own_row_alone(dtype):
    torch.manual_seed(3)
    rows = 30
    logits = torch.randn(rows, 60).to(dtype)
    kinds = settings(
        rows, temperatures=[0.0, 0.3, 1.0] * 10, top_k=[0, 4] * 15, top_p=[1.0, 0.4, 0.9, 1.0, 0.99] * 6,
        min_p=[0.0] * 15 + [0.2] * 15,
    )  # fmt: skip
    kinds |= {"seeds": torch.arange(rows), "positions": torch.arange(rows) + 5}
    together = choose(logits, **kinds, filtered=True)
    assert torch.equal(together[::3], logits[::3].argmax(-1))
    for row in range(rows):
        alone = {name: value[row : row + 1] for name, value in kinds.items()}
        assert int(choose(logits[row : row + 1], **alone, filtered=True)) == int(together[row])


def test_draws_stay_as_they_are():
    """A seed's tokens are a promise from one version to the next."""
    logits = torch.linspace(-2, 2, 1000).repeat(8, 1)
    found = choose(
        logits, **settings(8, temperatures=0.8), seeds=torch.arange(8) * 10**12 - 5, positions=torch.arange(8) * 999,
        filtered=False,
    )  # fmt: skip
    assert found.tolist() == [989, 621, 896, 789, 641, 900, 868, 997]


# Log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_log_probs_are_the_log_softmax(dtype):
    torch.manual_seed(4)
    logits = (torch.randn(5, 70) * 3).to(dtype)
    tokens = ints(0, 69, 3, 3, int(logits[4].argmax()))
    own, ranks, values, ids, _ = log_probs(logits, tokens, 6)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(own.double(), expected[torch.arange(5), tokens], rtol=0, atol=1e-5)
    torch.testing.assert_close(values.double(), expected.topk(6).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(expected.gather(1, ids), expected.topk(6).values)
    assert ranks.tolist() == [1 + sum(x > row[token] for x in row) for row, token in zip(logits, tokens, strict=True)]
    assert int(ranks[4]) == 1


def test_log_probs_of_small_vocabularies_and_of_nothing_but_the_token():
    own, ranks, values, ids, _ = log_probs(torch.zeros(2, 3), ints(0, 2), 5)
    assert ids.sort(-1).values.tolist() == [[0, 1, 2]] * 2 and ranks.tolist() == [1, 1]
    torch.testing.assert_close(values, torch.full((2, 3), -math.log(3)))
    own, ranks, values, ids, _ = log_probs(torch.tensor([[-INF, 1.0, -INF]]), ints(0), 0)
    assert own.tolist() == [-INF] and ranks.tolist() == [2] and values.shape == ids.shape == (1, 0)


def test_log_probs_of_given_ids_and_of_logits():
    logits = torch.randn(3, 9)
    given = torch.tensor([[8, 0], [1, 1], [5, 2]])
    own, _, values, ids, named = log_probs(logits, ints(8, 4, 5), 2, given)
    expected = logits.log_softmax(-1)
    assert torch.equal(named, expected.gather(1, given)) and float(named[0, 0]) == float(own[0])
    own, _, values, ids, named = log_probs(logits, ints(8, 4, 5), 2, given, normalized=False)
    assert torch.equal(own, logits[[0, 1, 2], [8, 4, 5]]) and torch.equal(named, logits.gather(1, given))
    assert torch.equal(values, logits.topk(2).values) and torch.equal(values, logits.gather(1, ids))


def test_processed_logits_are_those_of_the_draw():
    logits = torch.randn(4, 30)
    changes = {"temperatures": [0.5, 0.0, 2.0, 1.0], "top_k": [3, 3, 0, 0], "top_p": [1.0, 0.5, 0.7, 1.0]}
    found = processed(logits, **settings(4, **changes))
    assert torch.equal(found[1], logits[1]) and torch.equal(found[3], logits[3])
    for row, name, value in ((0, "top_k", 3), (2, "top_p", 0.7)):
        temperature = changes["temperatures"][row]
        expected = left(logits[row : row + 1], temperatures=temperature, **{name: value}) / temperature
        torch.testing.assert_close(found[row], expected[0])
        assert 0 < int((found[row] == -INF).sum()) < 30


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
    logits = torch.randn(1, 32)
    changes = {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperatures": 0.8}
    tokens = choose(
        logits.expand(DRAWS, -1), **settings(DRAWS, **changes), seeds=torch.arange(DRAWS),
        positions=torch.arange(DRAWS) % 17, filtered=True,
    )  # fmt: skip
    assert sorted(set(tokens.tolist())) == kept(logits, **changes)[0]
    assert chi_square(tokens, left(logits, **changes)[0] / 0.8) > ALPHA


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


@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_row_with_nan_gives_no_token_and_harms_no_other(place):
    torch.manual_seed(6)
    logits = torch.randn(3, 20)
    seeds, positions = ints(1, 2, 3), ints(4, 5, 6)
    changes = settings(3, top_k=5, top_p=0.8, min_p=0.01) | {"seeds": seeds, "positions": positions}
    clean = choose(logits, **changes, filtered=True)
    whole = log_probs(logits, clean, 3)
    logits[1, place] = torch.nan
    for filtered, temperatures in ((True, [1.0] * 3), (True, [1.0, 0.0, 1.0]), (False, [1.0] * 3), (False, [0.0] * 3)):
        changes["temperatures"] = torch.tensor(temperatures)
        tokens = choose(logits, **changes, filtered=filtered)
        assert tokens[1] == -1 and (tokens[[0, 2]] >= 0).all()
        if filtered:
            assert tokens[[0, 2]].tolist() == clean[[0, 2]].tolist()
    assert greedy(logits)[1] == -1
    clean[1] = -1
    for found, expected in zip(log_probs(logits, clean, 3), whole, strict=True):
        assert torch.equal(found[[0, 2]], expected[[0, 2]])

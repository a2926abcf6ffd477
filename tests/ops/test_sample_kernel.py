"""The sampler's kernels draw what the reference draws."""

import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

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
    assert kernel.greedy(logits).tolist() == [0, 1500, 1999, 1024, 0]
    drawn = kernel.draw(logits, ints(1, 2, 3, 4, 5), ints(1, 2, 3, 4, 5)).tolist()
    assert drawn[:3] == [0, 1500, 1999]
    assert 1024 <= drawn[3] < 2000


def test_no_rows():
    assert kernel.greedy(torch.zeros(0, 5, device=DEVICE)).shape == (0,)
    assert kernel.draw(torch.zeros(0, 5, device=DEVICE), ints(), ints()).shape == (0,)

"""Rotary embedding: channel i and channel i + half are one complex number, turned by the position's angle."""

import cmath
import math

import pytest
import torch

from nanovllm.ops.rotary import rotate

# Two products and a sum, of numbers up to 4 or so; 16-bit types also hold cosine and sine rounded.
# Absolute, because the sum may cancel: float32 2^-24 * 4 * 2; 16-bit 3 roundings of 2^-11 (2^-8) each, of up to 4.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def angles(turns: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for turns [tokens, half]."""
    cos, sin = turns.cos()[:, None], turns.sin()[:, None]
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def by_hand(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    tokens, heads, head_dim = x.shape
    half = head_dim // 2
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float64)
    for token in range(tokens):
        for head in range(heads):
            row = x[token, head].double().tolist()
            for pair in range(half):
                turned = complex(row[pair], row[pair + half]) * cmath.exp(1j * float(turns[token, pair]))
                out[token, head, pair], out[token, head, pair + half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"), [(0, 2, 8), (1, 1, 2), (1, 3, 16), (5, 2, 64), (3, 7, 80), (4, 1, 6)]
)
def test_turns_each_pair(tokens, heads, head_dim, dtype):
    torch.manual_seed(tokens + heads + head_dim)
    x = torch.randn(tokens, heads, head_dim).clamp(-3, 3).to(dtype)
    turns = torch.rand(tokens, head_dim // 2, dtype=torch.float64) * 20 - 10
    out = rotate(x, *angles(turns, dtype))
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), by_hand(x, turns), rtol=0, atol=TOLERANCE[dtype])


def test_a_quarter_turn_moves_the_first_half_to_the_second():
    """The sign by itself: (1, 0) turned by +90 degrees is (0, 1), not (0, -1)."""
    turns = torch.full((1, 2), math.pi / 2, dtype=torch.float64)
    x = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(
        rotate(x, *angles(turns, torch.float64)), torch.tensor([[[0.0, 0.0, 1.0, 2.0]]], dtype=torch.float64)
    )


def test_heads_may_be_a_slice_of_a_wider_row():
    torch.manual_seed(1)
    qkv = torch.randn(6, 9, 16)
    turns = torch.rand(6, 8, dtype=torch.float64)
    x = qkv[:, 2:6]
    assert not x.is_contiguous()
    torch.testing.assert_close(
        rotate(x, *angles(turns, torch.float32)).double(), by_hand(x, turns), rtol=0, atol=TOLERANCE[torch.float32]
    )


def test_scores_depend_on_the_distance_alone():
    torch.manual_seed(2)
    q, k = torch.randn(2, 1, 1, 32, dtype=torch.float64)
    speed = 1 / 10_000 ** (torch.arange(16, dtype=torch.float64) / 16)

    def score(query_place: int, key_place: int) -> float:
        turned = (
            rotate(x, *angles(place * speed[None], torch.float64)) for x, place in ((q, query_place), (k, key_place))
        )
        return math.prod((1.0, float(torch.mul(*turned).sum())))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-12)
    assert abs(score(7, 3) - score(3, 7)) > 1e-3


def test_the_input_is_left_alone():
    x = torch.randn(3, 2, 8)
    before = x.clone()
    rotate(x, *angles(torch.ones(3, 4, dtype=torch.float64), torch.float32))
    assert torch.equal(x, before)

"""RMS normalisation means the formula: x / sqrt(mean(x^2) + eps) * weight, row by row."""

import math

import pytest
import torch

from nanovllm.ops.rms_norm import add_rms_norm, rms_norm

EPS = 1e-6

# Relative bounds. 16-bit types: one rounding before the scaling and one after, each of half a unit in the last
# place (2^-11, 2^-8). float32: a sum of up to 1023 squares, a square root, two products.
RELATIVE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2 * 2**-11, torch.bfloat16: 2 * 2**-8}
# Numbers under 6.1e-5 are subnormal in float16, with steps of 6e-8.
ABSOLUTE = {torch.float64: 0.0, torch.float32: 0.0, torch.float16: 1e-7, torch.bfloat16: 0.0}

SHAPES = [(0, 8), (1, 1), (1, 64), (3, 7), (7, 100), (2, 1023)]


def by_hand(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    rows, gains = x.double().tolist(), weight.double().tolist()
    normed = []
    for row in rows:
        root = math.sqrt(sum(value * value for value in row) / len(row) + eps)
        normed.append([value / root * gain for value, gain in zip(row, gains, strict=True)])
    return torch.tensor(normed, dtype=torch.float64).view(x.shape)


def check(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.double(), expected, rtol=RELATIVE[dtype] * 1.01, atol=ABSOLUTE[dtype])


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_means_the_formula(rows, width, dtype):
    torch.manual_seed(rows * 1000 + width)
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    check(rms_norm(x, weight, EPS), by_hand(x, weight), dtype)


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
def test_rows_may_lie_apart(dtype):
    torch.manual_seed(1)
    padded = torch.randn(10, 37).to(dtype)
    weight = torch.randn(29).to(dtype)
    x = padded[::2, 3:32]
    assert not x.is_contiguous()
    check(rms_norm(x, weight, EPS), by_hand(x, weight), dtype)


def test_heads_may_have_a_weight_each():
    torch.manual_seed(2)
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    out = rms_norm(x, weight, EPS)
    for head in range(3):
        check(out[:, head], by_hand(x[:, head], weight[head]), torch.float32)


def test_each_head_is_a_row_of_its_own():
    torch.manual_seed(3)
    x, weight = torch.randn(4, 3, 80), torch.randn(80)
    check(rms_norm(x, weight, EPS).flatten(0, 1), by_hand(x.flatten(0, 1), weight), torch.float32)


def test_a_row_of_zeros_stays_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 9), torch.ones(9), EPS), torch.zeros(2, 9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_squares_are_summed_in_float32(dtype):
    x = torch.full((1, 300), 300.0).to(dtype)  # 300 * 300^2 is 27 million; float16 ends at 65504
    check(rms_norm(x, torch.ones(300).to(dtype), EPS), torch.ones(1, 300, dtype=torch.float64), dtype)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1.0])
def test_eps_stands_under_the_root(eps):
    torch.manual_seed(4)
    x, weight = torch.randn(3, 10) * 0.01, torch.ones(10)
    check(rms_norm(x, weight, eps), by_hand(x, weight, eps), torch.float32)


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_gives_the_norm_of_the_sum_and_the_sum(rows, width, dtype):
    torch.manual_seed(rows + width)
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, width), (rows, width), (width,)))
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, before[0] + before[1])
    check(normed, by_hand(total, weight), dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(5)
    x, weight = torch.randn(257, 96), torch.randn(96)
    whole = rms_norm(x, weight, EPS)
    for rows in (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 255, 256):
        assert torch.equal(rms_norm(x[:rows], weight, EPS), whole[:rows])

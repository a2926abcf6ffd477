"""The normalisation's kernel means what its reference says."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.ops.rms_norm import kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6

# float32: sums in another order and an approximate root, a few units of 6e-8. 16 bits: where the two straddle a
# rounding line, the first rounding differs by one unit in the last place, and the second by one more.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2 * 2**-10, torch.bfloat16: 2 * 2**-7}
SHAPES = [(0, 8), (1, 1), (1, 64), (3, 7), (13, 100), (2, 1023), (2, 1024), (1, 5000)]

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[expected.dtype], atol=1e-7)


@each_dtype
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows, width, dtype):
    padded = torch.randn(rows, width + 8, device=DEVICE).to(dtype)
    x, weight = padded[:, 3 : width + 3], torch.randn(width, device=DEVICE).to(dtype)
    check(kernel.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@each_dtype
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_rms_norm(rows, width, dtype):
    x = torch.randn(rows, 2 * width, device=DEVICE).to(dtype)[:, width:]
    residual = (torch.randn(rows, width + 5, device=DEVICE) * 3).to(dtype)[:, :width]
    weight = torch.randn(width, device=DEVICE).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = kernel.add_rms_norm(x, residual, weight, EPS)
    if dtype is torch.bfloat16 and DEVICE == "cpu":  # Triton's interpreter cuts where it should round
        torch.testing.assert_close(total, x + residual, rtol=2**-7, atol=0)
    else:
        assert torch.equal(total, x + residual)  # one addition and one rounding: nothing is left to differ
    check(normed, reference.rms_norm(total, weight, EPS))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@each_dtype
@pytest.mark.parametrize(("tokens", "heads", "width"), [(0, 2, 16), (1, 1, 8), (3, 5, 80), (5, 2, 128)])
def test_heads_of_a_packed_projection(tokens, heads, width, dtype):
    qkv = torch.randn(tokens, heads + 3, width, device=DEVICE).to(dtype)
    weight = torch.randn(width, device=DEVICE).to(dtype)
    x = qkv[:, 1 : heads + 1]
    check(kernel.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


def test_no_row_is_read_beyond_its_end():
    padded = torch.full((4, 3, 20), torch.nan, device=DEVICE)
    padded[:, :, 4:15] = torch.randn(4, 3, 11, device=DEVICE)
    x, weight = padded[:, :, 4:15], torch.ones(11, device=DEVICE)
    check(kernel.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


def test_zeros_stay_zero_and_nan_keeps_to_its_row():
    x = torch.zeros(3, 9, device=DEVICE)
    x[1, 4] = torch.nan
    out = kernel.rms_norm(x, torch.ones(9, device=DEVICE), EPS)
    assert out.isnan().all(1).tolist() == [False, True, False]
    assert not out[[0, 2]].any()


@pytest.mark.gpu
def test_rows_beyond_32_bits():
    x = torch.zeros(2**18 + 1, 8192 + 8, device="cuda", dtype=torch.bfloat16)[:, :8192]
    x[-1] = torch.randn(8192, device="cuda").to(torch.bfloat16)
    weight = torch.ones(8192, device="cuda", dtype=torch.bfloat16)
    out = kernel.rms_norm(x, weight, EPS)
    check(out[-1:], reference.rms_norm(x[-1:], weight, EPS))

"""The rotation's kernel means what its reference says."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.ops.rotary import kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Both round the first product and the sum; a fused multiply-add may put either on the other side of a rounding line.
# Where the two products cancel, what counts is the size of the products, about 4: absolute, not relative.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4 * 2**-10, torch.bfloat16: 4 * 2**-7}

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def angles(tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.rand(tokens, 1, head_dim // 2, device=DEVICE) * 100
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@each_dtype
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"), [(0, 2, 8), (1, 1, 2), (1, 3, 64), (5, 2, 80), (3, 7, 128), (2, 1, 256)]
)
def test_rotate(tokens, heads, head_dim, dtype):
    qkv = torch.randn(tokens, heads + 2, head_dim, device=DEVICE).to(dtype)
    x = qkv[:, 1 : heads + 1]
    before, (cos, sin) = qkv.clone(), angles(tokens, head_dim, dtype)
    out = kernel.rotate(x, cos, sin)
    assert out.is_contiguous() and torch.equal(qkv, before)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(out, reference.rotate(x, cos, sin), rtol=bound, atol=bound)


def test_no_turn_changes_nothing():
    x = torch.randn(3, 2, 10, device=DEVICE)
    still = torch.ones(3, 1, 10, device=DEVICE), torch.zeros(3, 1, 10, device=DEVICE)
    assert torch.equal(kernel.rotate(x, *still), x)


def test_angles_may_be_slices():
    wide = torch.randn(4, 1, 40, device=DEVICE)
    x, cos, sin = torch.randn(4, 3, 16, device=DEVICE), wide[:, :, :16], wide[:, :, 20:36]
    torch.testing.assert_close(kernel.rotate(x, cos, sin), reference.rotate(x, cos, sin), rtol=2e-6, atol=2e-6)

"""Gated activations against the formulas, in double precision by hand."""

import math

import pytest
import torch

from nanovllm.ops.activation import ACTIVATIONS, gate_times_up

FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}

# 16-bit: the activation is rounded, then the product: two half units in the last place (2^-11, 2^-8).
# Absolute: for negative x the bracket of gelu is 1 minus almost 1, which leaves 6e-8 * x in float32.
RELATIVE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2 * 2**-11, torch.bfloat16: 2 * 2**-8}
ABSOLUTE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2e-6, torch.bfloat16: 2e-6}


def by_hand(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    width = gate_up.shape[1] // 2
    rows = [[FORMULAS[name](row[i]) * row[i + width] for i in range(width)] for row in gate_up.double().tolist()]
    return torch.tensor(rows, dtype=torch.float64).view(gate_up.shape[0], width)


def test_every_activation_has_a_formula_here():
    assert set(FORMULAS) == set(ACTIVATIONS)


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 1), (1, 33), (5, 48), (3, 257)])
def test_means_the_formula(rows, width, name, dtype):
    torch.manual_seed(rows + width)
    gate_up = (torch.randn(rows, 2 * width) * 2).to(dtype)
    out = gate_times_up(gate_up, name)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), by_hand(gate_up, name), rtol=RELATIVE[dtype] * 1.01, atol=ABSOLUTE[dtype])


@pytest.mark.parametrize("name", FORMULAS)
def test_rows_may_lie_apart(name):
    torch.manual_seed(1)
    gate_up = torch.randn(8, 40)[::2, 3:25]
    assert not gate_up.is_contiguous()
    torch.testing.assert_close(gate_times_up(gate_up, name).double(), by_hand(gate_up, name), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_large_inputs_do_not_overflow(name):
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(gate_times_up(gate_up, name), torch.tensor([[1e4, 0.0, 0.0]]))


def test_the_gate_comes_first():
    assert torch.equal(gate_times_up(torch.tensor([[0.0, 5.0]]), "silu"), torch.zeros(1, 1))
    assert gate_times_up(torch.tensor([[5.0, 1.0]]), "silu").item() == pytest.approx(5 / (1 + math.exp(-5)))

"""The gated activations' kernel means what its reference says."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.ops.activation import ACTIVATIONS, kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Both round the activation and the product: at most a unit in the last place each, where they straddle a line.
RELATIVE = {torch.float32: 4e-6, torch.float16: 2 * 2**-10, torch.bfloat16: 2 * 2**-7}
# For negative x the bracket of gelu is 1 minus almost 1, which leaves 6e-8 * x in float32, times a value of up to 10.
ABSOLUTE = 4e-6


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(0, 4), (1, 1), (1, 33), (5, 48), (3, 1025), (2, 3072)])
def test_gate_times_up(rows, width, name, dtype):
    gate_up = (torch.randn(2 * rows, 2 * width + 3, device=DEVICE) * 2).to(dtype)[::2, 1 : 2 * width + 1]
    out = kernel.gate_times_up(gate_up, name)
    assert out.is_contiguous()
    torch.testing.assert_close(out, reference.gate_times_up(gate_up, name), rtol=RELATIVE[dtype], atol=ABSOLUTE)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's remark, under the interpreter, that exp(10,000) is infinite
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_inputs_do_not_overflow(name):
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 1.0, 1.0, 1.0]], device=DEVICE)
    expected = torch.tensor([[1e4, 0.0, 0.0]], device=DEVICE)
    torch.testing.assert_close(kernel.gate_times_up(gate_up, name), expected)

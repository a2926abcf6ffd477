"""The gated activations of a decoder's feed-forward block (Shazeer 2020, arXiv 2002.05202)."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
"""Hugging Face's ``hidden_act`` names."""


def gate_times_up(gate_up: Float[Tensor, "tokens two_width"], activation: str) -> Float[Tensor, "tokens width"]:
    """Return activation(gate) * up, where each row of ``gate_up`` holds gate and then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up

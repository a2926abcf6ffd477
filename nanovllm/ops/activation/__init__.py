"""Gated activation: silu(gate) * up and its relatives."""

from torch import Tensor

from nanovllm.ops.activation import reference
from nanovllm.ops.activation.reference import ACTIVATIONS
from nanovllm.ops.kernels import kernels_run_on

__all__ = ["ACTIVATIONS", "gate_times_up"]


def gate_times_up(gate_up: Tensor, activation: str) -> Tensor:
    """See ``reference.gate_times_up``."""
    if kernels_run_on(gate_up):
        from nanovllm.ops.activation import kernel

        return kernel.gate_times_up(gate_up, activation)
    return reference.gate_times_up(gate_up, activation)

"""Gated activation: silu(gate) * up and its relatives."""

from nanovllm.ops.activation.reference import ACTIVATIONS, gate_times_up

__all__ = ["ACTIVATIONS", "gate_times_up"]

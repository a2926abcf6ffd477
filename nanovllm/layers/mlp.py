"""The gated feed-forward block."""

from jaxtyping import Float
from torch import Tensor, nn

from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.layers.linear import Linear, MergedLinear
from nanovllm.ops.activation import ACTIVATIONS, gate_times_up


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.activation not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise CheckpointError(f"hidden_act is {config.activation!r}; known are {known}.")
        self.activation = config.activation
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = MergedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """Return what the block adds to each token."""
        added: Tensor = self.down_proj(gate_times_up(self.gate_up_proj(x), self.activation))
        return added

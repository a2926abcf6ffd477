"""The gated feed-forward block."""

from jaxtyping import Float
from torch import Tensor, nn

from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.layers.linear import Linear, MergedLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.ops.activation import ACTIVATIONS


class MLP(nn.Module):
    """down(activation(gate(y)) * up(y)), where y is the norm of x + residual."""

    def __init__(self, config: ModelConfig, *, adds: bool = True) -> None:
        super().__init__()
        self.adds = adds
        if config.activation not in list(ACTIVATIONS):  # a list: it may be anything, hashable or not
            known = ", ".join(sorted(ACTIVATIONS))
            raise CheckpointError(f"hidden_act is {config.activation!r}; known are {known}.")
        self.activation = config.activation
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = MergedLinear(config.hidden_size, parts, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(
        self, x: Float[Tensor, "... tokens width"], residual: Float[Tensor, "tokens width"] | None, norm: RMSNorm
    ) -> tuple[Float[Tensor, "... tokens width"], Float[Tensor, "tokens width"] | None]:
        """Return what the block adds to each token and x + residual, or their sum, as ``Linear.plus`` does.

        Unless it ``adds``: then the block's result is whole, for a norm in between.
        """
        gated, total = self.gate_up_proj.gated_after_norm(x, residual, norm, self.activation)
        return self.down_proj.plus(gated, total) if self.adds else (self.down_proj(gated), total)

"""RMS normalisation with a learned scale."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanovllm.ops.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Normalise rows; with a residual, add it first and also return the sum."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the normalised rows."""
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: Float[Tensor, "... tokens width"], residual: Float[Tensor, "tokens width"]
    ) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "tokens width"]]:
        """Return (the normalised sum, the sum)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

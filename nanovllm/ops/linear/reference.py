"""A linear layer: rows times a matrix."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def linear(
    x: Float[Tensor, "tokens inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "tokens outputs"]:
    """Return x weight^T + bias."""
    return F.linear(x, weight, bias)

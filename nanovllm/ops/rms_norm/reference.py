"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, "*per width"], eps: float
) -> Float[Tensor, "*rows width"]:
    """Divide each row by its root mean square and scale it by ``weight``.

    ``weight`` is [width], or [heads, width] for rows [..., heads, width] that have a weight each. At least
    float32 inside; one rounding to the type of ``x`` before the scaling, as Llama's own code does, and one after.
    """
    wide = x if x.dtype is torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (wide * scale).to(x.dtype) * weight


def whole(x: Float[Tensor, "... tokens width"], dtype: torch.dtype) -> Float[Tensor, "tokens width"]:
    """Return the sum of the parts that a product may come in (``linear.reference.plus``)."""
    return x if x.dim() == 2 else x.sum(0).to(dtype)


def add_rms_norm(
    x: Float[Tensor, "... tokens width"],
    residual: Float[Tensor, "tokens width"],
    weight: Float[Tensor, " width"],
    eps: float,
) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "tokens width"]]:
    """Return (norm of the sum, the sum): what stands between two blocks of a decoder. ``x`` may come in parts."""
    total = whole(x, residual.dtype) + residual
    return rms_norm(total, weight, eps), total

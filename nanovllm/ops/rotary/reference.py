"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Hugging Face."""

import torch
from jaxtyping import Float
from torch import Tensor


def rotate(
    x: Float[Tensor, "tokens heads head_dim"],
    cos: Float[Tensor, "tokens 1 head_dim"],
    sin: Float[Tensor, "tokens 1 head_dim"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Turn each pair (x[i], x[i + head_dim / 2]) by the token's angle for pair i.

        out[i]          = x[i] cos[i] - x[i + half] sin[i]
        out[i + half]   = x[i + half] cos[i] + x[i] sin[i]

    ``sin`` carries the sign: its first half is negated, so one roll of ``x`` serves both lines.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)

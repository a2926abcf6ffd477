"""A linear layer: rows times a matrix; alone, behind a norm, and between a norm and a gated activation."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from nanovllm.ops.activation.reference import gate_times_up
from nanovllm.ops.rms_norm.reference import add_rms_norm, rms_norm


def linear(
    x: Float[Tensor, "tokens inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> Float[Tensor, "tokens outputs"]:
    """Return x weight^T + bias."""
    return F.linear(x, weight, bias)


def plus(
    x: Float[Tensor, "tokens inputs"],
    residual: Float[Tensor, "tokens outputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> tuple[Float[Tensor, "... tokens outputs"], Float[Tensor, "tokens outputs"] | None]:
    """Return two summands for the norm behind: (``linear``, the residual), or (their sum, None).

    The first may come in float32 parts [parts, tokens, outputs], which are still to be added: see ``whole``.
    """
    return linear(x, weight, bias), residual


def gated(
    x: Float[Tensor, "tokens inputs"],
    weight: Float[Tensor, "two_width inputs"],
    bias: Float[Tensor, " two_width"] | None,
    activation: str,
) -> Float[Tensor, "tokens width"]:
    """Return activation(gate) * up: the layer gives rows of gate and then up."""
    return gate_times_up(linear(x, weight, bias), activation)


def norm_linear(
    x: Float[Tensor, "tokens inputs"],
    residual: Float[Tensor, "tokens inputs"] | None,
    norm_weight: Float[Tensor, " inputs"],
    eps: float,
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"] | None = None,
) -> tuple[Float[Tensor, "tokens outputs"], Float[Tensor, "tokens inputs"]]:
    """Return (the layer of the norm of x + residual, x + residual). Without a residual the sum is ``x`` itself."""
    normed, total = (
        (rms_norm(x, norm_weight, eps), x) if residual is None else add_rms_norm(x, residual, norm_weight, eps)
    )
    return linear(normed, weight, bias), total


def norm_gated(
    x: Float[Tensor, "tokens inputs"],
    residual: Float[Tensor, "tokens inputs"] | None,
    norm_weight: Float[Tensor, " inputs"],
    eps: float,
    weight: Float[Tensor, "two_width inputs"],
    bias: Float[Tensor, " two_width"] | None,
    activation: str,
) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "tokens inputs"]]:
    """Return (activation(gate) * up, x + residual): ``norm_linear`` gives rows of gate and then up."""
    gate_up, total = norm_linear(x, residual, norm_weight, eps, weight, bias)
    return gate_times_up(gate_up, activation), total

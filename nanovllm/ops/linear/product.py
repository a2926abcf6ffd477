"""What a layer holds once its weight is prepared: the product alone, behind a norm, and between a norm and a gate."""

from collections.abc import Callable

from torch import Tensor

from nanovllm.ops.activation import gate_times_up
from nanovllm.ops.rms_norm import add_rms_norm, rms_norm


class Product:
    """x weight^T + bias as a function of x; whatever surrounds it is computed by operations of their own.

    ``parameters`` returns weight and bias again: the memory that ``multiply`` reads, or a copy if that is packed.
    """

    def __init__(
        self, multiply: Callable[[Tensor], Tensor], parameters: Callable[[], tuple[Tensor, Tensor | None]]
    ) -> None:
        self.multiply = multiply
        self.parameters = parameters

    def __call__(self, x: Tensor) -> Tensor:
        """See ``reference.linear``."""
        return self.multiply(x)

    def plus(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``reference.plus``."""
        return self.multiply(x), residual

    def after_norm(self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``reference.norm_linear``."""
        normed, total = norm(x, residual, norm_weight, eps)
        return self.multiply(normed), total

    def gated_after_norm(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, activation: str
    ) -> tuple[Tensor, Tensor]:
        """See ``reference.norm_gated``."""
        gate_up, total = self.after_norm(x, residual, norm_weight, eps)
        return gate_times_up(gate_up, activation), total


def norm(x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (the norm of x + residual, x + residual). Without a residual the sum is ``x`` itself, which is whole."""
    if residual is None:
        return rms_norm(x, norm_weight, eps), x
    return add_rms_norm(x, residual, norm_weight, eps)

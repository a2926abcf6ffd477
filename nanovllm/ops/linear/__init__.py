"""Linear layers: PyTorch's own, or packed for a CPU."""

from torch import Tensor

from nanovllm.ops.linear import packed, reference

__all__ = ["linear", "prepare"]


def prepare(weight: Tensor) -> Tensor:
    """Return what ``linear`` likes best in place of a loaded weight; the weight itself may be dropped."""
    return packed.pack(weight) if packed.can_pack(weight) else weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``reference.linear`` for the contract; ``weight`` is plain or from ``prepare``."""
    if weight.is_mkldnn:
        return packed.linear(x, weight, bias)
    return reference.linear(x, weight, bias)

"""Token ids from what the host knows and what the last step drew."""

from torch import Tensor

from nanovllm.ops.kernels import TRITON
from nanovllm.ops.take_tokens import reference

__all__ = ["take_tokens"]


def take_tokens(sources: Tensor, drawn: Tensor) -> Tensor:
    """See ``reference.take_tokens``. One kernel on a GPU, where a decode would wait for the launch of five."""
    if TRITON and sources.is_cuda:
        from nanovllm.ops.take_tokens import kernel

        return kernel.take_tokens(sources, drawn)
    return reference.take_tokens(sources, drawn)

"""Linear layers on a GPU whose rows do not depend on each other, to the last bit.

A library picks another kernel for another number of rows, which adds up a row in another order; so a request's numbers
depend on how many others there are. This one kernel has one order for all of them.
"""

from functools import partial

from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.linear.product import Product


def available(weight: Tensor) -> bool:
    """Whether the kernel can take the weight."""
    return bool(weight.numel()) and kernels_run_on(weight)


def prepare(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the layer as a function of its input, each row of which gives the same bits in any company."""
    from nanovllm.ops.linear import invariant_kernel

    weight = weight.contiguous()
    return Product(partial(invariant_kernel.linear, weight=weight, bias=bias), lambda: (weight, bias))

"""Linear layers: PyTorch's own, or with the weight packed once for a CPU."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nanovllm.ops.linear import fbgemm, onednn
from nanovllm.ops.linear.reference import linear

__all__ = ["prepare"]


def prepare(weight: Tensor, bias: Tensor | None, storage: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return ``reference.linear`` with this weight and bias, as a function of its input, as fast as can be here.

    ``storage`` is the type the weight is held in. On a CPU it may be float16 below a float32 weight; a weight out
    of its range, or a build of torch that cannot, keeps float32. The weight itself may be dropped afterwards.
    """
    if weight.device.type == "cpu" and weight.numel():
        if storage is torch.float16 and fbgemm.available() and fbgemm.fits(weight):
            return fbgemm.prepare(weight, bias)
        if onednn.available(weight.dtype):
            return onednn.prepare(weight, bias)
    return partial(linear, weight=weight, bias=bias)

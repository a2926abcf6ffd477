"""Linear layers: PyTorch's own; the weight packed once for a CPU; kernels for few rows, or for all, on a GPU."""

from functools import partial

import torch
from torch import Tensor

from nanovllm.ops.linear import fbgemm, few_rows, invariant, onednn
from nanovllm.ops.linear.product import Product
from nanovllm.ops.linear.reference import linear

__all__ = ["Product", "prepare"]


def prepare(weight: Tensor, bias: Tensor | None, storage: torch.dtype, *, deterministic: bool = False) -> Product:
    """Return ``reference.linear`` with this weight and bias, as a function of its input, as fast as can be here.

    What is returned also computes the layer behind a norm (``after_norm``) and between a norm and a gated activation
    (``gated_after_norm``), where one kernel may do for all. ``storage`` is the type the weight is held in. On a CPU
    it may be float16 below a float32 weight; a weight out of its range, or a build of torch that cannot, keeps
    float32. ``deterministic``: on a GPU a row gives the same bits whatever rows come with it. The weight itself may
    be dropped afterwards; on a GPU it is not copied, and a change of it there is a change of the layer.
    """
    if weight.device.type == "cpu" and weight.numel():
        if storage is torch.float16 and fbgemm.available() and fbgemm.fits(weight):
            return fbgemm.prepare(weight, bias)
        if onednn.available(weight.dtype):
            return onednn.prepare(weight, bias)
    if deterministic and invariant.available(weight):
        return invariant.prepare(weight, bias)
    if few_rows.available(weight):
        return few_rows.FewRows(weight, bias)
    return Product(partial(linear, weight=weight, bias=bias), lambda: (weight, bias))

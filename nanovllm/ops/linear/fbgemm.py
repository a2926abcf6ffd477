"""Linear layers on a CPU with the weight held in float16 and everything else in float32.

A decode step reads every weight once and does little else, so half the bytes is twice the speed. FBGEMM widens each
weight to float32 in registers and multiplies and adds in float32: the one rounding is the weight's own, to 11 bits,
which a bfloat16 weight (8 bits) does not even notice. Rows do not depend on each other.
"""

import torch
from torch import Tensor

from nanovllm.ops.linear.product import Product

LARGEST = torch.finfo(torch.float16).max


def available() -> bool:
    """Whether this build of torch has FBGEMM (x86 with AVX2)."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def fits(weight: Tensor) -> bool:
    """Whether every value lies in float16's range."""
    return weight.dtype is torch.float32 and bool(weight.abs().amax() <= LARGEST)


def prepare(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the layer as a function of its float32 input; holds the weight in FBGEMM's own layout."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def product(x: Tensor) -> Tensor:
        out: Tensor = multiply(x, packed)
        return out

    def parameters() -> tuple[Tensor, Tensor | None]:
        unpacked, _ = torch.ops.quantized.linear_unpack_fp16(packed)
        return unpacked, bias

    return Product(product, parameters)

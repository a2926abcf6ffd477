"""Linear layers on a CPU with the weight packed once for oneDNN.

``F.linear`` on a plain float32 weight picks another MKL kernel for each small number of rows: slow ones, and with
results that differ in the last bit, so that a request's tokens depend on its neighbours. Packed for 32 rows, every
row count tried gives bit for bit the same row in float32; packed for 1 row, the single row differs (docs/log.md).
In bfloat16 that depends on the processor.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.linear.product import Product

ROWS = 32
"""How many rows the packing is laid out for."""

FEWEST_ROWS = 4
"""One to three rows take longer than four, which read the weights at the full memory bandwidth."""


def available(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN (x86 and some ARM) for the type."""
    return torch._C._has_mkldnn and dtype in (torch.float32, torch.bfloat16)


def prepare(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the layer as a function of its input; holds a copy of the weight in oneDNN's own layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if 0 < rows < FEWEST_ROWS:
            x = F.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        out: Tensor = multiply(x, packed, bias, "none", [], "")
        return out[:rows]

    return Product(product, lambda: (packed.to_dense(), bias))

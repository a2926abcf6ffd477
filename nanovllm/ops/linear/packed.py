"""Linear layers on a CPU with the weight packed once for oneDNN.

``F.linear`` on a plain float32 weight picks another MKL kernel for each small number of rows: slow ones (2 rows took
2.5 times as long as here), and with results that differ in the last bit, so that a request's tokens depend on its
neighbours. Packed for 32 rows, every row count tried gave bit for bit the same row, and each was faster; packed for
1 row, the single row differs (figures in docs/numbers.md). One exception is left: a single row of more than 1024
inputs, whose sums oneDNN splits in another way; such a row is computed twice.
"""

import torch
from torch import Tensor

ROWS = 32
"""How many rows the packing is laid out for."""

LONG = 1024
"""A single row of more inputs is summed in another order than the rows of a larger batch."""


def can_pack(weight: Tensor) -> bool:
    """Whether this weight can be packed here: oneDNN is built in (x86) and knows the type."""
    known = weight.dtype in (torch.float32, torch.bfloat16)
    return weight.device.type == "cpu" and known and torch._C._has_mkldnn and weight.numel() > 0


def pack(weight: Tensor) -> Tensor:
    """Return the weight in oneDNN's own layout: an opaque tensor of the same size, for ``linear`` alone."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    return packed


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``reference.linear``; ``packed`` comes from ``pack``."""
    alone = x.shape[0] == 1 and x.shape[1] > LONG
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x.expand(2, -1) if alone else x, packed, bias, "none", [], "")
    return out[:1] if alone else out

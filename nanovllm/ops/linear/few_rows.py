"""Linear layers on a GPU: kernels of our own while there are few rows, PyTorch's product beyond.

A decode step of a few requests does little but read each weight once. cuBLAS takes two to three times as long as that
for Qwen3-0.6B on an H200, and the norms and gates between its products are kernels that read next to nothing.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.kernels import kernels_run_on
from nanovllm.ops.linear.product import Product, norm

ROWS, LONG_ROWS = 16, 1
"""Most rows that go to ``kernel``, and of rows of more than ``LONG`` numbers."""

TILE_ROWS = 64
"""Most rows that go to ``tile_kernel``; beyond them cuBLAS is faster, or no slower."""

LONG, WIDE = 3072, 32_768
"""The products of Qwen3-0.6B have up to so many inputs, those of Qwen3-8B more: there one row alone gains. A product
with more outputs, a head, is large enough for cuBLAS from 17 rows on."""

IN_PARTS = (65, 256)
"""Numbers of rows for which cuBLAS computes a product of few outputs faster in parts along its inputs."""

BLOCK, BUSY = 128, 64
"""A processor takes a block of about so many rows by so many outputs; a large GPU has room for more of these than
``BUSY``. Twice as many parts as that needs gain nothing: they are written and read again in float32."""


def available(weight: Tensor) -> bool:
    """Whether the kernels can take the weight."""
    return bool(weight.numel()) and kernels_run_on(weight)


class FewRows(Product):
    """A product that takes its kernel where that is faster; ``reference`` says what is computed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from nanovllm.ops.linear import kernel, tile_kernel

        weight = weight.contiguous()
        self.kernel, self.tile_kernel, self.weight, self.bias = kernel, tile_kernel, weight, bias
        long = weight.shape[1] > LONG
        self.rows = min(LONG_ROWS if long else ROWS, kernel.most_rows(weight.dtype))
        self.norm_rows = 0 if weight.shape[1] > kernel.WIDEST else min(self.rows, kernel.norm_rows(weight.dtype))
        tiles = not long and weight.shape[0] < WIDE and weight.element_size() == 2
        self.tile_rows = TILE_ROWS if tiles else self.rows
        # not a method of its own: an object that refers to itself would hold the weight until the next collection
        multiply = partial(_multiply, weight=weight, bias=bias, rows=self.rows, tile_rows=self.tile_rows)
        super().__init__(multiply, lambda: (weight, bias))
        torch.cuda.synchronize(weight.device)  # from now on a kernel may read the weight before it waits for others

    def after_norm(self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``reference.norm_linear``."""
        if self._fuses(x, residual, norm_weight):
            return self.kernel.norm_linear(x, norm_weight, eps, self.weight, self.bias), x
        return super().after_norm(x, residual, norm_weight, eps)

    def gated_after_norm(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, activation: str
    ) -> tuple[Tensor, Tensor]:
        """See ``reference.norm_gated``."""
        if self._fuses(x, residual, norm_weight):
            return self.kernel.norm_gated(x, norm_weight, eps, self.weight, self.bias, activation), x
        if 0 < x.shape[-2] <= self.tile_rows and kernels_run_on(norm_weight, self.weight):
            normed, total = norm(x, residual, norm_weight, eps)
            gated = self.kernel.gated if normed.shape[0] <= self.rows else self.tile_kernel.multiply
            return gated(normed, self.weight, self.bias, activation), total
        return super().gated_after_norm(x, residual, norm_weight, eps, activation)

    def plus(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``reference.plus``."""
        if 0 < x.shape[0] <= self.rows and kernels_run_on(x, residual, self.weight):
            return self.kernel.plus(x, residual, self.weight, self.bias), None
        if self.rows < x.shape[0] <= self.tile_rows and kernels_run_on(x, self.weight):
            return self.tile_kernel.multiply(x, self.weight, self.bias, in_parts=True), residual
        parts = choose_parts(x.shape[0], *self.weight.shape)
        if parts > 1 and self.bias is None and kernels_run_on(x, self.weight) and _adds_in_float32(x):
            return multiply_in_parts(x, self.weight, parts), residual
        return super().plus(x, residual)

    def _fuses(self, x: Tensor, residual: Tensor | None, norm_weight: Tensor) -> bool:
        if residual is not None or not 0 < x.shape[0] <= self.norm_rows:
            return False
        return kernels_run_on(x, norm_weight, self.weight)


def choose_parts(rows: int, outputs: int, inputs: int) -> int:
    """Return into how many parts along its inputs a product for the library is cut: 1, 2 or 4."""
    blocks = -(-rows // BLOCK) * -(-outputs // BLOCK)
    least, most = IN_PARTS
    if not least <= rows <= most or blocks > BUSY or inputs % (4 * BLOCK):
        return 1
    return 4 if 8 * blocks <= BUSY else 2


def _adds_in_float32(x: Tensor) -> bool:
    """Whether PyTorch gives the sums of such numbers as float32: from 2.8 on, of 16 bits."""
    return x.element_size() == 2 and hasattr(torch.ops.aten.bmm, "dtype")


def multiply_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Return the product in float32 as [parts, rows, outputs], which are to be added; see ``reference.plus``.

    ``parts`` products of as many inputs each, computed by the library side by side.
    """
    factors = x.view(len(x), parts, -1).transpose(0, 1)  # [parts, rows, inputs / parts]
    lines = weight.view(len(weight), parts, -1).permute(1, 2, 0)  # [parts, inputs / parts, outputs]
    return torch.bmm(factors, lines, out_dtype=torch.float32)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, tile_rows: int) -> Tensor:
    if not (0 < x.shape[0] <= tile_rows and kernels_run_on(x, weight)):
        return F.linear(x, weight, bias)
    from nanovllm.ops.linear import kernel, tile_kernel

    return kernel.linear(x, weight, bias) if x.shape[0] <= rows else tile_kernel.multiply(x, weight, bias)

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
        return super().plus(x, residual)

    def _fuses(self, x: Tensor, residual: Tensor | None, norm_weight: Tensor) -> bool:
        if residual is not None or not 0 < x.shape[0] <= self.norm_rows:
            return False
        return kernels_run_on(x, norm_weight, self.weight)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, tile_rows: int) -> Tensor:
    if not (0 < x.shape[0] <= tile_rows and kernels_run_on(x, weight)):
        return F.linear(x, weight, bias)
    from nanovllm.ops.linear import kernel, tile_kernel

    return kernel.linear(x, weight, bias) if x.shape[0] <= rows else tile_kernel.multiply(x, weight, bias)

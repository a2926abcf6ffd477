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
"""Most rows that go to the kernels, and of rows of more than ``LONG`` numbers.

Beyond them cuBLAS is faster: ``bench/linear.py`` shows from where on."""

LONG = 3072
"""The products of Qwen3-0.6B have up to so many inputs, those of Qwen3-8B more: there one row alone gains."""

NORM_ROWS = 2
"""Most rows that go to a kernel with the norm in it, which each of its programs computes again."""


def available(weight: Tensor) -> bool:
    """Whether the kernels can take the weight."""
    return bool(weight.numel()) and kernels_run_on(weight)


class FewRows(Product):
    """A product that takes its kernel where that is faster; ``reference`` says what is computed."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from nanovllm.ops.linear import kernel

        weight = weight.contiguous()
        self.kernel, self.weight, self.bias = kernel, weight, bias
        long = weight.shape[1] > LONG
        self.rows = min(LONG_ROWS if long else ROWS, kernel.most_rows(weight.dtype))
        self.norm_rows = min(LONG_ROWS if long else NORM_ROWS, kernel.FEW)
        if weight.shape[1] > kernel.WIDEST:
            self.norm_rows = 0
        # not a method of its own: an object that refers to itself would hold the weight until the next collection
        super().__init__(partial(_multiply, weight=weight, bias=bias, rows=self.rows), lambda: (weight, bias))
        torch.cuda.synchronize(weight.device)  # from now on a kernel may read the weight before it waits for others

    def after_norm(self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``reference.norm_linear``."""
        if self._fuses(x, residual, norm_weight):
            return self.kernel.norm_linear(x, residual, norm_weight, eps, self.weight, self.bias)
        return super().after_norm(x, residual, norm_weight, eps)

    def gated_after_norm(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, activation: str
    ) -> tuple[Tensor, Tensor]:
        """See ``reference.norm_gated``."""
        if self._fuses(x, residual, norm_weight):
            return self.kernel.norm_gated(x, residual, norm_weight, eps, self.weight, self.bias, activation)
        if 0 < x.shape[0] <= self.rows and kernels_run_on(x, self.weight):
            normed, total = norm(x, residual, norm_weight, eps)
            return self.kernel.gated(normed, self.weight, self.bias, activation), total
        return super().gated_after_norm(x, residual, norm_weight, eps, activation)

    def _fuses(self, x: Tensor, residual: Tensor | None, norm_weight: Tensor) -> bool:
        if not 0 < x.shape[0] <= self.norm_rows:
            return False
        return kernels_run_on(x, x if residual is None else residual, norm_weight, self.weight)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    if 0 < x.shape[0] <= rows and kernels_run_on(x, weight):
        from nanovllm.ops.linear import kernel

        return kernel.linear(x, weight, bias)
    return F.linear(x, weight, bias)

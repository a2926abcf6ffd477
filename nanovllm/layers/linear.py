"""Layers that hold a matrix: linear ones, the embedding, and the head.

``prepare(storage)`` is called when a layer's parameters have been loaded. It may rearrange them for the device and hold
them in a narrower type, so the parameters themselves are gone afterwards. ``restore()`` brings them back, so that they
can be written and prepared once more: on a GPU in the memory that recorded graphs read, on a CPU as a copy.
``deterministic`` is an engine's option, see ``ops.linear.prepare``.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from nanovllm.layers.norm import RMSNorm
from nanovllm.ops.linear import Product, prepare
from nanovllm.ops.look_up import look_up


class Linear(nn.Module):
    """x weight^T + bias."""

    make_product: Callable[..., Product] = staticmethod(prepare)
    """What takes the weight; a room may put its own into the layers of a model."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = _parameter(outputs, inputs)
        self.bias = _parameter(outputs) if bias else None
        self._product: Product | None = None

    def prepare(self, storage: torch.dtype, *, deterministic: bool = False) -> None:
        """Take the weight in the form that the device likes best."""
        assert self.weight is not None, "a layer is prepared twice"
        bias = None if self.bias is None else self.bias.data
        self._product = self.make_product(self.weight.data, bias, storage, deterministic=deterministic)
        self.weight = self.bias = None

    def restore(self) -> None:
        """Take back ``prepare``."""
        assert self._product is not None, "a layer is restored before prepare()"
        weight, bias = self._product.parameters()
        self.weight, self.bias = _frozen(weight), None if bias is None else _frozen(bias)
        self._product = None

    def forward(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "tokens outputs"]:
        """Apply the layer to each row."""
        assert self._product is not None, "a layer is used before prepare()"
        return self._product(x)

    def plus(
        self, x: Float[Tensor, "tokens inputs"], residual: Float[Tensor, "tokens outputs"]
    ) -> tuple[Float[Tensor, "... tokens outputs"], Float[Tensor, "tokens outputs"] | None]:
        """Apply the layer; add the residual, or leave that to the norm behind: see ``ops.linear.reference``."""
        assert self._product is not None, "a layer is used before prepare()"
        return self._product.plus(x, residual)

    def after_norm(
        self, x: Float[Tensor, "... tokens inputs"], residual: Float[Tensor, "tokens inputs"] | None, norm: RMSNorm
    ) -> tuple[Float[Tensor, "tokens outputs"], Float[Tensor, "tokens inputs"]]:
        """Return (the layer of the norm of x + residual, that sum), in one pass where the device has one."""
        assert self._product is not None, "a layer is used before prepare()"
        return self._product.after_norm(x, residual, norm.weight, norm.eps)

    def gated_after_norm(
        self,
        x: Float[Tensor, "... tokens inputs"],
        residual: Float[Tensor, "tokens inputs"] | None,
        norm: RMSNorm,
        activation: str,
    ) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "tokens inputs"]]:
        """Return (activation(gate) * up, x + residual), where ``after_norm`` would give rows of gate and then up."""
        assert self._product is not None, "a layer is used before prepare()"
        return self._product.gated_after_norm(x, residual, norm.weight, norm.eps, activation)


class MergedLinear(Linear):
    """Several linear layers of the same input as one, because one large product is faster than three small ones.

    ``parts`` maps each checkpoint name (``q_proj``) to its number of outputs, in the order of the rows.
    """

    def __init__(self, inputs: int, parts: dict[str, int], *, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias)
        self.parts = parts


class Embedding(nn.Module):
    """Token ids to vectors."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = _parameter(vocab_size, width)
        self._dtype = torch.float32

    def prepare(self, storage: torch.dtype, *, deterministic: bool = False) -> None:
        """Hold the table in the narrower type; what comes out has the model's."""
        self._dtype = self.weight.dtype
        if self.weight.device.type == "cpu":
            self.weight.data = self.weight.data.to(storage)

    def restore(self) -> None:
        """Take back ``prepare``."""
        self.weight.data = self.table()

    def forward(self, token_ids: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """Look up each token."""
        return look_up(self.weight, token_ids).to(self._dtype)

    def table(self) -> Float[Tensor, "vocab width"]:
        """Return the whole table in the model's type, for a head that is tied to it."""
        return self.weight.data.to(self._dtype)


class Head(nn.Module):
    """Hidden states to logits. One that is tied to an embedding has no parameter of its own."""

    def __init__(self, width: int, vocab_size: int, tied: Embedding | None) -> None:
        super().__init__()
        self.weight = _parameter(vocab_size, width) if tied is None else None
        self._tied = (tied,)  # in a tuple, so that the embedding is not registered as a child of the head
        self._product: Product | None = None

    def prepare(self, storage: torch.dtype, *, deterministic: bool = False) -> None:
        """Take the weight in the form that the device likes best; a tied embedding keeps its own copy."""
        weight = self._tied[0].table() if self._tied[0] is not None else self.weight
        assert weight is not None, "the head is prepared twice"
        self._product = prepare(weight.data, None, storage, deterministic=deterministic)
        self.weight = None

    def restore(self) -> None:
        """Take back ``prepare``."""
        if self._tied[0] is None and self._product is not None:
            self.weight = _frozen(self._product.parameters()[0])
        self._product = None

    def forward(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Return one row of logits for each row of hidden states; on a CPU at least float32.

        On a GPU they keep the model's type: a wider copy would be the largest thing that a step reads and writes.
        """
        assert self._product is not None, "the head is used before prepare()"
        logits = self._product(hidden)
        return logits if logits.is_cuda or logits.dtype is torch.float64 else logits.float()


def _parameter(*shape: int) -> nn.Parameter:
    return _frozen(torch.empty(*shape))


def _frozen(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)

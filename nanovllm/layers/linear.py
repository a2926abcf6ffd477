"""Linear layers: one matrix, or several of a checkpoint's matrices stacked into one."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanovllm.ops.linear import linear, prepare


class Linear(nn.Module):
    """x weight^T + bias. ``prepare`` swaps the loaded weight for what the device likes best."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def prepare(self) -> None:
        """Repack the weight; call it once, after loading."""
        self.weight = nn.Parameter(prepare(self.weight.data), requires_grad=False)

    def forward(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "tokens outputs"]:
        """Apply the layer to each row."""
        return linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several linear layers of the same input as one, because one large product is faster than three small ones.

    ``parts`` maps each checkpoint name (``q_proj``) to its number of outputs, in the order of the rows.
    """

    def __init__(self, inputs: int, parts: dict[str, int], *, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias)
        self.parts = parts


class Head(nn.Module):
    """Hidden states to logits. Tied to the embedding, it has no weight of its own in the checkpoint."""

    def __init__(self, width: int, vocab_size: int, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width), requires_grad=False) if tied is None else None
        self._tied = (tied,)  # in a tuple, so that the embedding is not registered as a child of the head
        self._prepared: Tensor | None = None

    def prepare(self) -> None:
        """Repack the weight; call it once, after loading. A tied embedding keeps its own copy for look-ups."""
        tied = self._tied[0]
        self._prepared = prepare((self.weight if tied is None else tied.weight).data)  # type: ignore[union-attr]
        self.weight = None

    def forward(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Return one row of logits for each row of hidden states."""
        assert self._prepared is not None, "the head is used before prepare()"
        return linear(hidden, self._prepared)

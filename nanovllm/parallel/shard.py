"""A rank's share of a model: which parts of which matrices, and where their products meet again (Shoeybi et al. 2019,
arXiv 1909.08053, section 3).

    attention   q, k, v: this rank's heads (rows)            o_proj: their columns      one sum over ranks
    mlp         gate, up: this rank's channels (rows)        down_proj: their columns   one sum over ranks
    vocabulary  embedding: this rank's tokens (rows)         one sum; the head's logits are gathered

A rank's model is an ordinary one with fewer heads, channels and tokens. Only what ends in a sum or a gathering is a
layer of its own here; where a checkpoint's tensor is cut follows from comparing the shapes with the whole model's.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.errors import ConfigError
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import Embedding, Head, Linear
from nanovllm.layers.mlp import MLP
from nanovllm.loader import Place, build_model, parameter_places
from nanovllm.parallel.communicator import Communicator


def share(config: ModelConfig, size: int) -> ModelConfig:
    """Return the facts of one rank's part; raise ConfigError where a model cannot be cut into so many.

    With fewer key-value heads than ranks each is held by several. The vocabulary is padded.
    """
    for count, what in ((config.num_heads, "attention heads"), (config.intermediate_size, "channels of the MLP")):
        if count % size:
            _refuse(size, config, f"must divide the model's {count} {what}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        _refuse(
            size, config, f"must divide the model's {config.num_kv_heads} key-value heads, or be a multiple of them"
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
        vocab_size=-(-config.vocab_size // size),
    )


def first_kv_head(config: ModelConfig, rank: int, size: int) -> int:
    """Return the first of a rank's key-value heads, which follow each other; ``config`` is the whole model's."""
    return rank * config.num_kv_heads // size


def shard(model: Any, whole: ModelConfig, communicator: Communicator, max_model_len: int) -> None:
    """Turn a model built of ``share``'s facts, without weights yet, into this rank's part; ``places`` follow."""
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.o_proj = RowLinear(module.o_proj, communicator)
        elif isinstance(module, MLP):
            module.down_proj = RowLinear(module.down_proj, communicator)
    embedding = VocabularyEmbedding(model.model.embed_tokens, whole.vocab_size, communicator)
    tied = model.lm_head.weight is None
    model.model.embed_tokens = embedding
    model.lm_head = VocabularyHead(model.lm_head, whole.vocab_size, embedding if tied else None, communicator)
    full = build_model(whole, max_model_len, torch.float32, torch.device("cpu")).places
    model.places = {
        name: _cut(place, full[name].shape, communicator) for name, place in parameter_places(model).items()
    }


class RowLinear(Linear):
    """A layer whose inputs are spread over ranks: each holds the columns of its inputs, and the products are added."""

    def __init__(self, layer: Linear, communicator: Communicator) -> None:
        assert layer.weight is not None, "layers are cut before they are prepared"
        with torch.device("meta"):
            super().__init__(*reversed(layer.weight.shape), bias=layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self._communicator = communicator

    def prepare(self, storage: torch.dtype, *, deterministic: bool = False) -> None:
        """See ``Linear``. The bias is added on rank 0 alone."""
        if self.bias is not None and self._communicator.rank:
            self.bias.data.zero_()
        super().prepare(storage, deterministic=deterministic)

    def forward(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "tokens outputs"]:
        """Apply the layer to each row, of which this rank has its inputs."""
        return self._communicator.all_reduce(super().forward(x))

    def plus(
        self, x: Float[Tensor, "tokens inputs"], residual: Float[Tensor, "tokens outputs"]
    ) -> tuple[Float[Tensor, "tokens outputs"], Float[Tensor, "tokens outputs"] | None]:
        """Apply the layer; the residual is added once, when the sum over ranks is known."""
        return self._communicator.plus(super().forward(x), residual)


class VocabularyEmbedding(Embedding):
    """Token ids to vectors, of which each rank holds those of its part of the vocabulary."""

    def __init__(self, layer: Embedding, vocab_size: int, communicator: Communicator) -> None:
        with torch.device("meta"):
            super().__init__(*layer.weight.shape)
        self.weight = layer.weight
        self._communicator = communicator
        self._start, self._rows = _tokens(vocab_size, len(layer.weight), communicator.rank)

    def prepare(self, storage: torch.dtype, *, deterministic: bool = False) -> None:
        """See ``Embedding``. Padding is zero."""
        self.weight.data[self._rows :].zero_()
        super().prepare(storage, deterministic=deterministic)

    def forward(self, token_ids: Int64[Tensor, " tokens"]) -> Float[Tensor, "tokens width"]:
        """Look up each token; a rank adds nothing to those that are not its own."""
        places = token_ids - self._start
        others = (places < 0) | (places >= self._rows)
        found = super().forward(places.masked_fill_(others, 0))
        return self._communicator.all_reduce(found.masked_fill_(others[:, None], 0.0))


class VocabularyHead(Head):
    """Hidden states to logits: each rank computes those of its part of the vocabulary, and gets those of all."""

    def __init__(self, layer: Head, vocab_size: int, tied: Embedding | None, communicator: Communicator) -> None:
        rows, width = (layer.weight if tied is None else tied.weight).shape  # type: ignore[union-attr]
        with torch.device("meta"):
            super().__init__(width, rows, tied)
        self.weight = layer.weight
        self._vocab_size = vocab_size
        self._communicator = communicator
        self._rows = _tokens(vocab_size, rows, communicator.rank)[1]

    def prepare(self, storage: torch.dtype, *, deterministic: bool = False) -> None:
        """See ``Head``. Padding is zero."""
        if self.weight is not None:
            self.weight.data[self._rows :].zero_()
        super().prepare(storage, deterministic=deterministic)

    def forward(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the whole vocabulary, the same bits on every rank; see ``Head``."""
        pieces = self._communicator.all_gather(super().forward(hidden))
        return pieces.movedim(0, 1).reshape(len(hidden), -1)[:, : self._vocab_size]


def _tokens(vocab_size: int, rows: int, rank: int) -> tuple[int, int]:
    """Return the first token of a rank that has room for ``rows``, and how many it has."""
    start = min(rank * rows, vocab_size)
    return start, min(rows, vocab_size - start)


def _cut(place: Place, whole: tuple[int, ...], communicator: Communicator) -> Place:
    """Return a place that takes this rank's part of a checkpoint's tensor of shape ``whole``."""
    rank, size = communicator.rank, communicator.size
    taken = []
    for held, full in zip(place.shape, whole, strict=True):
        if held == full:
            taken.append(slice(None))
        elif isinstance(place.module, (VocabularyEmbedding, VocabularyHead)):
            start, rows = _tokens(full, held, rank)
            taken.append(slice(start, start + rows))
            place = replace(place, stop=place.start + rows)
        else:  # heads that several ranks hold are cut at whole heads
            start = rank * full // size // held * held
            taken.append(slice(start, start + held))
    return replace(place, taken=tuple(taken), whole=whole)


def _refuse(size: int, config: ModelConfig, rule: str) -> None:
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.intermediate_size
    fits = [n for n in range(1, heads + 1) if not (heads % n or width % n or (kv_heads % n and n % kv_heads))]
    raise ConfigError(
        f"tensor_parallel_size is {size}; it {rule}. Sizes for this model: {', '.join(map(str, fits))}.",
        parameter="tensor_parallel_size", value=size,
    )  # fmt: skip

"""What every rank does while an engine is built; ``build.build_runner`` calls it at the right moments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.parallel.communicator import NCCL, Connection, Gloo
from nanovllm.parallel.peer import one_shot
from nanovllm.parallel.shard import first_kv_head, shard, share


class Rank:
    """One of ``tensor_parallel_size`` ranks. A ``Communicator`` that works once ``join`` has returned, for layers are
    built earlier.

    ``facts`` is the ``build.Plan`` of the whole model. Raises ConfigError where it cannot be cut.
    """

    def __init__(self, rank: int, config: EngineConfig, facts: Any) -> None:
        size = config.tensor_parallel_size
        if facts.deterministic and size > 2:
            raise ConfigError(
                f"deterministic is True; it must be False with tensor_parallel_size={size}: NCCL adds more than two "
                "numbers in an order that follows the size of a step. Use 2 ranks, or leave deterministic.",
                parameter="deterministic", value=True,
            )  # fmt: skip
        if config.compile:
            raise ConfigError(
                f"compile is True; it must be False with tensor_parallel_size={size}. Leave one of them.",
                parameter="compile", value=True,
            )  # fmt: skip
        self.rank, self.size = rank, size
        # with its number: a new thread would begin with the first device
        self.device = torch.empty(0, device=facts.device).device
        self.facts = replace(facts, model=share(facts.model, size))
        """The plan of this rank's part."""
        self._whole = facts
        self._connection: Connection | None = None

    @property
    def is_connected(self) -> bool:
        """Whether ``join`` has returned."""
        return self._connection is not None

    @property
    def connection(self) -> Connection:
        """The communicator below."""
        assert self._connection is not None, "ranks are not connected yet"
        return self._connection

    def join(self, identity: bytes, store: Path) -> None:
        """Meet the other ranks; returns when all have come."""
        if self.device.type == "cuda":
            self._connection = nccl = NCCL(identity, self.rank, self.size, self.device)
            self._connection = one_shot(nccl, self.device)
        else:
            self._connection = Gloo(store, self.rank, self.size)
            self.agree(0)  # all have read the store: it may go

    def connect(self) -> None:
        """Wait for the other ranks, and ``join`` them."""
        raise NotImplementedError

    def shard(self, model: Any) -> None:
        """Turn a model of ``facts.model``, without weights yet, into this rank's part of the whole."""
        shard(model, self._whole.model, self, self._whole.max_model_len)

    def cache_scales(self, scales: Float[Tensor, "layers 2 heads"]) -> Float[Tensor, "layers 2 kv_heads"]:
        """Return the scales of this rank's key-value heads."""
        first = first_kv_head(self._whole.model, self.rank, self.size)
        return scales[:, :, first : first + self.facts.model.num_kv_heads]

    def agree(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        return int(self.all_gather(torch.tensor([number], device=self.device)).min())

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        return self.connection.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        return self.connection.all_gather(x)

    def plus(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``Communicator``."""
        return self.connection.plus(x, residual)

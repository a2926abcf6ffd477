"""The tensors that hold keys and values, and how many bytes they weigh."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nanovllm.config import ModelConfig
from nanovllm.errors import ConfigError


class KVCache:
    """Keys and values of every layer, cut into blocks that requests hold through their block tables.

    One of float8 holds them divided by ``scales``: a number for the keys and one for the values of each head.
    """

    def __init__(
        self,
        data: Float[Tensor, "layers 2 blocks block_size kv_heads head_dim"],
        scales: Float[Tensor, "layers 2 kv_heads"] | None = None,
    ) -> None:
        self.data = data
        # views made once: every step asks for each of them
        self._layers = [(layer[0], layer[1]) for layer in data]
        self._slots = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._layers]
        self._scales: list[tuple[()] | tuple[Tensor, Tensor]] = [()] * len(data)
        if scales is not None:
            self._scales = [(layer[0], layer[1]) for layer in scales]

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        scales: Float[Tensor, "layers 2 kv_heads"] | None = None,
    ) -> "KVCache":  # fmt: skip
        """Allocate zeros, so that a place which is masked out adds 0 * 0 and never 0 * NaN.

        Raises ConfigError if there is not so much memory.

        ``scales`` belong to float8; None: all are 1.

        On a CPU the memory comes from calloc, whose pages are mapped when they are first written: a cache of
        gigabytes costs nothing until it is used. ``torch.zeros`` writes every page.
        """
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        if dtype is torch.float8_e4m3fn:  # without scales: those of trained models stay far below its largest, 448
            scales = (torch.ones(config.num_layers, 2, config.num_kv_heads) if scales is None else scales).to(device)
        try:
            if device.type == "cpu":
                memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
                return cls(torch.from_numpy(memory).view(dtype).view(shape), scales)
            return cls(torch.zeros(shape, dtype=dtype, device=device), scales)
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            raise ConfigError(
                f"there is no memory for a cache of {num_blocks} blocks ({math.prod(shape) * dtype.itemsize} bytes: "
                f"{error}). Lower num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization, or what "
                "the cache must hold: max_model_len and max_num_seqs.",
                parameter="num_gpu_blocks_override", value=num_blocks,
            ) from error  # fmt: skip

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros, as they were at first. Nobody waits for it."""
        for block in blocks:
            self.data[:, :, block].zero_()

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.data.shape[3]

    def layer(
        self, layer: int
    ) -> tuple[
        Float[Tensor, "blocks block_size kv_heads head_dim"],
        Float[Tensor, "blocks block_size kv_heads head_dim"],
    ]:
        """Return the keys and the values of one layer, as views."""
        return self._layers[layer]

    def slots(
        self, layer: int
    ) -> tuple[Float[Tensor, "slots kv_heads head_dim"], Float[Tensor, "slots kv_heads head_dim"]]:
        """Return the same without the cut into blocks: slot = block * block_size + offset."""
        return self._slots[layer]

    def scales(self, layer: int) -> tuple[()] | tuple[Float[Tensor, " kv_heads"], Float[Tensor, " kv_heads"]]:
        """Return the scales of the keys and those of the values of one layer; nothing if the cache has none."""
        return self._scales[layer]


def bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """What one token weighs in the cache, over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize

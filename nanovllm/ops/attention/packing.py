"""How a plan reaches the device: block tables as one rectangle, and all its integers in one copy."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

Integers = np.ndarray[Any, np.dtype[Any]]


def edges_of(sizes: Integers) -> Integers:
    """Return where each of the parts laid end to end begins, and where the last one ends: [parts + 1]."""
    return np.concatenate(([0], np.cumsum(sizes)))


def rectangle(block_tables: Sequence[Sequence[int]], counts: Integers) -> Integers:
    """Return the first ``counts[r]`` blocks of each request as [requests, max_blocks], 0 past the end.

    The padding is a block that exists: a library may prefetch it, never use it.
    """
    blocks = chain.from_iterable(table[:count] for table, count in zip(block_tables, counts.tolist(), strict=True))
    table = np.zeros((len(counts), counts.max(initial=1)), np.int32)
    table[np.arange(table.shape[1]) < counts[:, None]] = np.fromiter(blocks, np.int32, int(counts.sum()))
    return table


def send(parts: Sequence[Integers], device: torch.device) -> list[Tensor]:
    """Copy arrays of integers to the device in one piece; return them there as int32, in their shapes."""
    edges = edges_of(np.array([part.size for part in parts])).tolist()
    # the allocator of pinned memory keeps the buffer until the copy is done
    packed = torch.empty(edges[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    np.concatenate([part.ravel() for part in parts], out=packed.numpy(), casting="same_kind")
    there = packed.to(device, non_blocking=True)
    return [there[start : start + part.size].view(part.shape) for start, part in zip(edges, parts, strict=False)]

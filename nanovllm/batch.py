"""A decided step as tensors: what the model reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from nanovllm.scheduler import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of all requests of a step, end to end. Complete when built; never changed.

    request A: 3 new tokens   B: 1     C: 2
        token_ids         [ a5 a6 a7 | b9 | c0 c1 ]
        positions         [  5  6  7 |  9 |  0  1 ]
        sample_rows       [        2    3       5 ]   if all of them reach their end
    """

    token_ids: Int64[Tensor, " tokens"]
    positions: Int64[Tensor, " tokens"]
    """Place of each token in its request, from 0."""
    slot_mapping: Int64[Tensor, " tokens"]
    """Where its key and value go: block * block_size + offset."""
    sample_rows: Int64[Tensor, " samples"]
    """Rows after which a token is drawn, in the order of the spans that draw."""
    attend: Callable[..., Tensor]
    """The attention backend's ``attend``."""
    plan: Any
    """The attention backend's own view of the step."""


def build_batch(output: SchedulerOutput, block_size: int, backend: Any, device: torch.device) -> Batch:
    """Lay out a step's spans. ``backend`` is a module as ``nanovllm.ops.attention`` describes."""
    token_ids: list[int] = []
    positions: list[np.ndarray[Any, Any]] = []
    slots: list[np.ndarray[Any, Any]] = []
    sample_rows: list[int] = []
    tables: list[Sequence[int]] = []
    for span in output.spans:
        token_ids += span.request.token_ids[span.start : span.stop]
        places = np.arange(span.start, span.stop)
        table = np.asarray(span.request.block_ids)
        positions.append(places)
        slots.append(table[places // block_size] * block_size + places % block_size)
        tables.append(span.request.block_ids)
        if span.samples:
            sample_rows.append(len(token_ids) - 1)
    plan = backend.plan(
        [span.stop - span.start for span in output.spans],
        [span.stop for span in output.spans],
        tables,
        block_size,
        device,
    )
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        attend=backend.attend,
        plan=plan,
    )

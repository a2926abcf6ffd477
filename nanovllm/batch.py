"""A decided step as tensors: what the model reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from nanovllm.ops.take_tokens import take_tokens
from nanovllm.request import Request
from nanovllm.scheduler import SchedulerOutput, Span


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
    hidden_rows: Int64[Tensor, " kept"] | None = None
    """Rows that the last layer goes on with behind its attention, the only ones that come out; None: all."""
    attend_fresh: Callable[..., Tensor] | None = None
    """The backend's function for queries, keys and values as projected, if it has one and this step suits it."""


class Drawn:
    """The tokens that the last step drew, on the device: the next one may need them before the host knows them."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.tokens: Int64[Tensor, " most"] = torch.zeros(most, dtype=torch.int64, device=device)
        self._rows: dict[Request, int] = {}

    def source(self, span: Span) -> int:
        """Return the last token of a span, or -1 - row if it lies in a row of ``tokens`` and is not known here."""
        token_ids = span.request.token_ids
        return token_ids[span.stop - 1] if span.stop <= len(token_ids) else -1 - self._rows[span.request]

    def keep(self, spans: Sequence[Span], tokens: Int64[Tensor, " rows"]) -> None:
        """Keep what a step drew after these spans, until the next one draws. A graph has put its tokens here itself."""
        if tokens.device == self.tokens.device:
            self.tokens[: len(spans)].copy_(tokens)
        self._rows = {span.request: row for row, span in enumerate(spans)}


def build_batch(
    output: SchedulerOutput, block_size: int, backend: Any, drawn: Drawn, *, deterministic: bool = False,
    all_hidden: bool = False,
) -> Batch:  # fmt: skip
    """Lay out a step's spans. ``backend`` is a module as ``nanovllm.ops.attention`` describes.

    ``deterministic``: it is told where prompts end, so that it chooses by a token's place and not by a span's size.
    ``all_hidden``: hidden states are wanted of all rows, not only where a token is drawn.
    """
    device = drawn.tokens.device
    token_ids: list[int] = []
    positions: list[np.ndarray[Any, Any]] = []
    slots: list[np.ndarray[Any, Any]] = []
    sample_rows: list[int] = []
    tables: list[Sequence[int]] = []
    for span in output.spans:
        token_ids += span.request.token_ids[span.start : span.stop - 1]
        token_ids.append(drawn.source(span))
        places = np.arange(span.start, span.stop)
        table = np.asarray(span.request.block_ids)
        positions.append(places)
        slots.append(table[places // block_size] * block_size + places % block_size)
        tables.append(span.request.block_ids)
        if span.samples:
            sample_rows.append(len(token_ids) - 1)
    ends = [len(span.request.prompt_token_ids) for span in output.spans]
    plan = backend.plan(
        [span.stop - span.start for span in output.spans],
        [span.stop for span in output.spans],
        tables,
        block_size,
        device,
        **({"prompt_lens": ends} if deterministic else {}),
    )
    arrays = (np.array(token_ids), *map(np.concatenate, (positions, slots)), np.array(sample_rows, np.int64))
    sources, indices, mapping, sampled = send(arrays, device)
    ids = sources if device.type == "cpu" else take_tokens(sources, drawn.tokens)
    wanted = (
        None if all_hidden or len(sample_rows) == len(token_ids) else sampled if sample_rows else indices.new_zeros(1)
    )
    return Batch(ids, indices, mapping, sampled, backend.attend, plan, wanted)


def send(parts: Sequence[Int64[np.ndarray, " _"]], device: torch.device) -> list[Tensor]:
    """Return arrays of int64 as tensors on the device, sent in one copy that nobody waits for.

    Each begins at a multiple of 16 bytes: kernels are compiled for that, and would be once more for others.
    """
    if device.type == "cpu":
        return [torch.from_numpy(part) for part in parts]
    edges = np.cumsum([0, *(len(part) + len(part) % 2 for part in parts)]).tolist()
    # the allocator of pinned memory keeps the buffer until the copy is done
    packed = torch.empty(edges[-1], dtype=torch.int64, pin_memory=True)
    for start, part in zip(edges, parts, strict=False):
        packed.numpy()[start : start + len(part)] = part
    there = packed.to(device, non_blocking=True)
    return [there[start : start + len(part)] for start, part in zip(edges, parts, strict=False)]

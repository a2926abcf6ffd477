"""Paged attention through PyTorch's ``scaled_dot_product_attention``: the CPU's backend, and any device's fallback.

What costs time on a CPU is copying keys and calling the kernel, so:

* a request whose blocks are neighbours in the cache is read in place, through a view;
* decoding requests of one block each, whose blocks are neighbours, are one call: the cache itself is the batch;
* a decode's query heads that share a key-value head are the rows of one query.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

PREFERRED_BLOCK_SIZE = 128
"""Large enough for most answers of a laptop's batch to lie in one block, small enough for prefixes to be found."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests that decode one token each and whose only blocks are ``[first, first + number)``, in this order."""

    rows: Tensor
    """Int64 [number]: their rows in the step."""
    first: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class One:
    """One request: rows ``[start, stop)`` of the step, over ``context`` tokens in ``blocks``."""

    start: int
    stop: int
    context: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step is cut into calls; made once, used by every layer."""

    batches: tuple[Rows, ...]
    singles: tuple[One, ...]
    device: torch.device
    masks: dict[tuple[object, int | None], Tensor] = field(default_factory=dict)

    def mask(self, of: object, window: int | None, make: Callable[[], Tensor]) -> Tensor:
        """Return the additive mask of a call, made by the first layer that needs it."""
        if (of, window) not in self.masks:
            self.masks[of, window] = make()
        return self.masks[of, window]


def plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> Plan:
    """Cut a step into calls. Arguments have one entry for each request, in the order of its rows."""
    lone: list[tuple[int, int, int]] = []  # (block, row, context) of decodes with one block
    singles: list[One] = []
    row = 0
    for size, context, table in zip(query_lens, context_lens, block_tables, strict=True):
        if size == 1 and context <= block_size:
            lone.append((table[0], row, context))
        else:
            singles.append(One(row, row + size, context, tuple(table[: -(-context // block_size)])))
        row += size
    lone.sort()
    batches: list[Rows] = []
    start = 0
    for stop in range(1, len(lone) + 1):
        if stop == len(lone) or lone[stop][0] != lone[stop - 1][0] + 1:
            part = lone[start:stop]
            rows = torch.tensor([row for _, row, _ in part], dtype=torch.int64, device=device)
            batches.append(Rows(rows, part[0][0], tuple(context for _, _, context in part)))
            start = stop
    return Plan(tuple(batches), tuple(singles), device)


def attend(query: Tensor, keys: Tensor, values: Tensor, plan: Plan, scale: float, window: int | None = None) -> Tensor:
    """See ``reference.attend``; the plan stands for its three index tensors."""
    out = torch.empty_like(query)
    for batch in plan.batches:
        out[batch.rows] = _attend_rows(query, keys, values, batch, plan, scale, window)
    for one in plan.singles:
        out[one.start : one.stop] = _attend_one(query, keys, values, one, plan, scale, window)
    return out


def _attend_rows(
    query: Tensor, keys: Tensor, values: Tensor, batch: Rows, plan: Plan, scale: float, window: int | None
) -> Tensor:
    number, longest = len(batch.lengths), max(batch.lengths)
    heads, kv_heads, head_dim = query.shape[1], keys.shape[2], query.shape[2]
    q = query[batch.rows].view(number, kv_heads, heads // kv_heads, head_dim)
    k, v = (cache[batch.first : batch.first + number, :longest].transpose(1, 2) for cache in (keys, values))

    def make() -> Tensor:
        ages = torch.tensor(batch.lengths, device=plan.device)[:, None] - 1 - torch.arange(longest, device=plan.device)
        return _additive(ages, window, query.dtype)[:, None, None]  # [number, 1, 1, longest]

    mask = None
    if min(batch.lengths) != longest or (window is not None and longest > window):
        mask = plan.mask(("rows", batch.first), window, make)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.reshape(number, heads, head_dim)


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, one: One, plan: Plan, scale: float, window: int | None
) -> Tensor:
    size = one.stop - one.start
    first = 0 if window is None else max(0, one.context - size + 1 - window)  # older tokens no row can see
    k, v = (_tokens(cache, one, first) for cache in (keys, values))
    heads, kv_heads, head_dim = query.shape[1], keys.shape[2], query.shape[2]
    q = query[one.start : one.stop]
    if size == 1:
        q = q.view(1, kv_heads, heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(q, k, v, scale=scale).reshape(1, heads, head_dim)

    def make() -> Tensor:
        places = torch.arange(first, one.context, device=plan.device)
        return _additive(places[one.context - size - first :, None] - places, window, query.dtype)

    q = q.transpose(0, 1)[None]
    whole = size == one.context and (window is None or window >= size)
    mask = None if whole else plan.mask(("one", one.start), window, make)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _tokens(cache: Tensor, one: One, first: int) -> Tensor:
    """Return tokens ``[first, context)`` of a request as [1, kv_heads, tokens, head_dim]: a view if its blocks
    are neighbours, else a copy."""
    size = cache.shape[1]
    blocks = one.blocks[first // size :]
    skip, stop = first % size, one.context - first // size * size
    if blocks == tuple(range(blocks[0], blocks[0] + len(blocks))):
        flat = cache[blocks[0] : blocks[-1] + 1].flatten(0, 1)
    else:
        flat = cache[list(blocks)].flatten(0, 1)
    return flat[skip:stop].transpose(0, 1)[None]


def _additive(ages: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Turn "how many tokens back" into 0 where a row may look and -inf where it may not."""
    hidden = ages < 0 if window is None else (ages < 0) | (ages >= window)
    return torch.zeros(ages.shape, dtype=dtype, device=ages.device).masked_fill_(hidden, -torch.inf)

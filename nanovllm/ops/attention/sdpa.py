"""Paged attention through PyTorch's ``scaled_dot_product_attention``: the CPU's backend, and any device's fallback.

On a CPU, what costs time is copying keys and the number of calls. So decodes, the many requests with one new token,
are computed block by block, where the cache itself is the batch of one call and nothing is copied:

    block table of request A   [ 4 2 ]         rows of one call   block  2    3    4    5
                          B   [ 3 5 ]                            query  A    B    A    B

Each row attends to its block alone; then the pieces of a request are weighted by their sums of exponentials
(FlashDecoding, Dao et al. 2023). A row's arithmetic has the shape of a block, whatever the other rows are: on one
thread a decode gives the same bits alone and in company, on several MKL changes the last one now and then. Spans of
several tokens are computed one request after another.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

PREFERRED_BLOCK_SIZE = 128
"""Large enough for few rows, small enough for prefixes to be found."""

Span = tuple[int, int, Sequence[int]]
"""First row in the step, context length, block table."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Decodes, cut into one row for each pair of a request and a block it sees, in the order of the calls."""

    queries: Tensor | None
    """Int64 [rows]: the row of the step that holds the query; None if they are the step's rows, in order."""
    runs: tuple[tuple[int, int, int, int], ...]
    """(first row, number of rows, first block, step) of each call: its blocks lie equally far apart."""
    mask: Tensor
    """Float [rows, 1, 1, block_size]: 0 where the query may look, -inf where it may not."""
    most: int
    """Most rows of any one request."""
    parts: Tensor | None
    """Int64 [decodes, most]: the rows of each request, past its end the first of them (another's may hold NaN, and
    0 * NaN is NaN); None if that is 0, 1, 2, ..."""
    missing: Tensor | None
    """Float [decodes, most, 1, 1]: 0 for a row, -inf past the end; None if all requests have as many."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step is cut into calls; made once, used by every layer."""

    block_size: int
    decodes: tuple[Span, ...]
    spans: tuple[tuple[int, Span], ...]
    """(number of new tokens, where and what)."""
    begun: tuple[tuple[int, int], ...]
    """(block, tokens in it) of each block that the step begins and does not fill. Decodes read all of a block: a masked
    place adds 0 times what lies there, and 0 * NaN is NaN, so what others left there goes first."""
    made: dict[tuple[object, int | None], object] = field(default_factory=dict)
    """What the first layer of each window works out, for the others."""

    def once(self, of: object, window: int | None, make: Callable[[], object]) -> object:
        """Return what ``make`` returned the first time."""
        if (of, window) not in self.made:
            self.made[of, window] = make()
        return self.made[of, window]


def plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> Plan:
    """Cut a step into calls. Arguments have one entry for each request, in the order of its rows."""
    decodes: list[Span] = []
    spans: list[tuple[int, Span]] = []
    begun: list[tuple[int, int]] = []
    row = 0
    for size, context, table in zip(query_lens, context_lens, block_tables, strict=True):
        span = (row, context, table[: -(-context // block_size)])
        if size == 1 and device.type == "cpu":
            decodes.append(span)
        else:
            spans.append((size, span))
        if 0 < context % block_size <= size and device.type == "cpu":
            begun.append((table[context // block_size], context % block_size))
        row += size
    return Plan(block_size, tuple(decodes), tuple(spans), tuple(begun))


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: Plan, scale: float, window: int | None = None,
    *, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.attend``; the plan stands for its three index tensors. Fills the rest of begun blocks with 0.

    PyTorch's functions have no ``softcap``: with one each request is computed by products, one after the other.
    """
    for block, used in plan.begun:
        keys[block, used:] = 0
        values[block, used:] = 0
    decodes, spans = plan.decodes, plan.spans
    if softcap is not None:
        decodes, spans = (), (*((1, decode) for decode in plan.decodes), *spans)
    if decodes:
        rows = plan.once("rows", window, lambda: _cut(plan, window, query.dtype))
        assert isinstance(rows, Rows)
        decoded = _attend_rows(query, keys, values, rows, scale)
        if not spans:
            return decoded
    out = torch.empty_like(query)
    if decodes:
        out[[row for row, _, _ in decodes]] = decoded
    for size, span in spans:
        out[span[0] : span[0] + size] = _attend_span(query, keys, values, size, span, plan, scale, window, softcap)
    return out


def _cut(plan: Plan, window: int | None, dtype: torch.dtype) -> Rows:
    """Cut decodes into rows, ordered by block, so that few calls take them all."""
    size = plan.block_size
    pieces: list[tuple[int, int, int, int, int]] = []
    copies: Counter[int] = Counter()  # a block that several requests share has a row for each of them
    for owner, (_, context, table) in enumerate(plan.decodes):
        oldest = 0 if window is None else max(0, context - window)
        for place in range(oldest // size, len(table)):
            block, start = table[place], place * size
            pieces.append((copies[block], block, owner, oldest - start, context - start))
            copies[block] += 1
    pieces.sort()
    runs: list[tuple[int, int, int, int]] = []
    for row, (copy, block, *_) in enumerate(pieces):
        if row and pieces[row - 1][0] == copy:
            first_row, number, first_block, step = runs[-1]
            ahead = block - pieces[row - 1][1]
            if number == 1 or ahead == step:  # two blocks are a run, wherever they lie
                runs[-1] = (first_row, number + 1, first_block, ahead)
                continue
        runs.append((row, 1, block, 1))
    rows_of: list[list[int]] = [[] for _ in plan.decodes]
    for row, (_, _, owner, _, _) in enumerate(pieces):
        rows_of[owner].append(row)
    most = max(map(len, rows_of))
    parts = torch.tensor([rows + [-1] * (most - len(rows)) for rows in rows_of])
    places = torch.arange(size)
    first, stop = torch.tensor([piece[3:] for piece in pieces]).T[:, :, None]
    queries = [plan.decodes[owner][0] for _, _, owner, _, _ in pieces]
    return Rows(
        queries=None if not plan.spans and queries == list(range(len(queries))) else torch.tensor(queries),
        runs=tuple(runs),
        mask=_additive((places < first) | (places >= stop), dtype)[:, None, None],
        most=most,
        parts=None if parts.flatten().tolist() == list(range(parts.numel())) else parts.where(parts >= 0, parts[:, :1]),
        missing=None if bool((parts >= 0).all()) else _additive(parts < 0, torch.float32)[..., None, None],
    )


def _attend_rows(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float) -> Tensor:
    """Attend each row to its block, and put together what belongs together."""
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[2]
    q = (query if rows.queries is None else query[rows.queries]).view(-1, kv_heads, heads // kv_heads, head_dim)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    pieces = []
    for row, number, block, step in rows.runs:
        everything = number == q.shape[0]
        part, mask = (q, rows.mask) if everything else (q[row : row + number], rows.mask[row : row + number])
        blocks = slice(block, block + number * step, step)
        k, v = keys[blocks], values[blocks]
        pieces.append(_sdpa_with_sums(part, k, v, attn_mask=mask, scale=scale))
    out, sums = pieces[0] if len(pieces) == 1 else map(torch.cat, zip(*pieces, strict=True))
    if rows.parts is not None:
        out, sums = out[rows.parts], sums[rows.parts]  # [decodes, most, kv_heads, group, ...]
    elif rows.most > 1:
        out, sums = (piece.view(-1, rows.most, *piece.shape[1:]) for piece in (out, sums))
    if rows.most > 1:
        weights = (sums if rows.missing is None else sums + rows.missing).softmax(1)
        out = out.mul_(weights[..., None]).sum(1)
    return out.reshape(-1, heads, head_dim)


_sdpa_with_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""What ``scaled_dot_product_attention`` runs on a CPU; it also returns each row's logarithm of the sum of
exponentials, [batch, heads, queries]."""


def _attend_span(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    size: int,
    span: Span,
    plan: Plan,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend the ``size`` new tokens of one request to all its tokens."""
    start, context, table = span
    oldest = 0 if window is None else max(0, context - size + 1 - window)  # no row sees older tokens
    k, v = (_tokens(cache, table, oldest, context) for cache in (keys, values))
    q = query[start : start + size].transpose(0, 1)[None]
    whole = size == context and (window is None or window >= size) and softcap is None

    def make() -> Tensor:
        places = torch.arange(oldest, context, device=query.device)
        ages = places[context - size - oldest :, None] - places  # how far back each key lies
        return _additive((ages < 0) if window is None else (ages < 0) | (ages >= window), query.dtype)

    mask = None if whole else plan.once(start, window, make)
    assert mask is None or isinstance(mask, Tensor)
    if softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    assert mask is not None, "it is whole for PyTorch's functions alone"
    groups = q[0].reshape(k.shape[1], -1, size, q.shape[-1])  # [kv_heads, group, rows, head_dim]
    scores = softcap * torch.tanh(groups @ k[0, :, None].mT * (scale / softcap)) + mask
    return (scores.float().softmax(-1).to(v.dtype) @ v[0, :, None]).flatten(0, 1).transpose(0, 1)


def _tokens(cache: Tensor, table: Sequence[int], first: int, stop: int) -> Tensor:
    """Return tokens ``[first, stop)`` of a request as [1, kv_heads, tokens, head_dim].

    A view if its blocks are neighbours, else a copy.
    """
    size = cache.shape[1]
    skipped = first // size
    blocks = list(table[skipped:])
    if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        flat = cache[blocks[0] : blocks[-1] + 1].flatten(0, 1)
    else:
        flat = cache[blocks].flatten(0, 1)
    return flat[first - skipped * size : stop - skipped * size].transpose(0, 1)[None]


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn "must not look" into -inf and the rest into 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

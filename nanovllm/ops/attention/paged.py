"""Paged attention through our Triton kernels: the backend of CUDA devices of compute capability 8.0 and above.

``plan`` turns a step into three lists of integers, sent to the device in one copy; every layer reads them there.

    decodes   row, context length, start of its table, tokens in a chunk, first part     one token each
    pieces    first row, rows, position of the first, start of its table                 spans, cut into QUERY_TILE rows
    tables    the blocks of all requests, end to end

A decode's context is cut into chunks of MIN_CHUNK tokens, longer ones where that would make more than MAX_CHUNKS. If
there are enough decodes to keep the device busy, one program takes all chunks of a request in turn, and the longest
start first; if not, each chunk is a program (a *part*), and a second kernel adds the parts. The two give the same
numbers, and a request's chunks depend on its own context alone: what a request gets does not depend on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nanovllm.ops.attention import kernel

PREFERRED_BLOCK_SIZE = 64
"""The kernels are as fast with 16; but the host handles every block of every request in each step."""

MIN_CHUNK, MAX_CHUNKS = 256, 64
"""Tokens: two tiles of keys and values. 64 parts of 8 heads are four programs for each processor of a large GPU."""

QUERY_TILE = 128
"""Rows of a piece: as many as two groups of four warps multiply at once."""

PROGRAMS_PER_PROCESSOR = 3
"""How many decodes of the longest context each processor must have for contexts to stay uncut."""

DECODE_TILES = ((128, 4, 3), (64, 4, 3), (32, 4, 3), (32, 4, 2), (16, 4, 2))
PREFILL_TILES = ((64, 8, 3), (64, 8, 2), (32, 8, 2), (16, 8, 2))
"""Keys in a tile, warps, stages of the pipeline; the first that fits into shared memory is taken."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, as the kernels read it; made once, used by every layer."""

    decodes: Tensor
    """Int32 [decodes, 5], the longest context first."""
    owners: Tensor
    """Int32 [parts]: which decode a part belongs to, if contexts are cut."""
    pieces: Tensor
    """Int32 [pieces, 4], the longest first."""
    tables: Tensor
    """Int32 [blocks of all requests]."""
    longest: int
    """Tokens of the longest context of a decode."""
    total: int
    """Tokens of the contexts of all decodes."""
    processors: int
    shared_bytes: int
    """Shared memory that one program may use."""

    def splits(self, kv_heads: int, window: int | None) -> bool:
        """Whether each chunk shall be a program: if they are many and whole contexts would leave processors idle."""
        longest = self.longest if window is None else min(self.longest, window)
        total = self.total if window is None else min(self.total, window * self.decodes.shape[0])
        if self.owners.shape[0] == self.decodes.shape[0] or longest <= MIN_CHUNK:
            return False
        return kv_heads * total < PROGRAMS_PER_PROCESSOR * self.processors * longest


def plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> Plan:
    """Lay out a step for the kernels. Arguments have one entry for each request, in the order of its rows."""
    sizes, contexts = np.asarray(query_lens, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    counts = -(-contexts // block_size)
    rows, tables = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts  # where those of each request start
    blocks = chain.from_iterable(
        table[:count] for table, count in zip(block_tables, counts.tolist(), strict=True)
    )  # a table may be longer than its context

    ones = np.flatnonzero(sizes == 1)
    ones = ones[np.argsort(-contexts[ones], kind="stable")]
    chunks = np.maximum(MIN_CHUNK, 2 ** np.ceil(np.log2(contexts[ones] / MAX_CHUNKS))).astype(np.int64)
    parts = -(-contexts[ones] // chunks)
    decodes = np.stack((rows[ones], contexts[ones], tables[ones], chunks, np.cumsum(parts) - parts), axis=1)
    owners = np.repeat(np.arange(len(ones)), parts)

    spans = np.flatnonzero(sizes > 1)
    cuts = -(-sizes[spans] // QUERY_TILE)
    span = np.repeat(spans, cuts)
    done = (np.arange(len(span)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * QUERY_TILE  # rows before each piece
    length = np.minimum(sizes[span] - done, QUERY_TILE)
    pieces = np.stack((rows[span] + done, length, contexts[span] - sizes[span] + done, tables[span]), axis=1)
    pieces = pieces[np.argsort(-(pieces[:, 1] + pieces[:, 2]), kind="stable")]

    on_gpu = device.type == "cuda"
    lists = (decodes.ravel(), owners, pieces.ravel())
    edges = np.cumsum([len(part) for part in lists]).tolist()
    num_blocks = int(counts.sum())
    # the allocator of pinned memory keeps the buffer until the copy is done
    packed = torch.empty(edges[-1] + num_blocks, dtype=torch.int32, pin_memory=on_gpu)
    array = packed.numpy()
    np.concatenate(lists, out=array[: edges[-1]], casting="same_kind")
    array[edges[-1] :] = np.fromiter(blocks, np.int32, num_blocks)
    sent = packed.to(device, non_blocking=True)

    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    return Plan(
        decodes=sent[: edges[0]].view(-1, 5),
        owners=sent[edges[0] : edges[1]],
        pieces=sent[edges[1] : edges[2]].view(-1, 4),
        tables=sent[edges[2] :],
        longest=int(contexts[ones].max(initial=0)),
        total=int(contexts[ones].sum()),
        processors=properties.multi_processor_count if properties else 1,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 1 << 16) if properties else 1 << 20,
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, plan: Plan, scale: float, window: int | None = None) -> Tensor:
    """See ``reference.attend``; the plan stands for its three index tensors.

    Channels must lie side by side; rows, heads and blocks may lie anywhere, keys and values in the same way.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    width = keys.element_size() * (1 << (keys.shape[3] - 1).bit_length())  # bytes of a key with its padding
    if plan.pieces.shape[0]:
        tile = _fit(PREFILL_TILES, width, plan.shared_bytes - QUERY_TILE * width)
        kernel.prefill(query, keys, values, out, plan.pieces, plan.tables, scale, window, QUERY_TILE, *tile)
    if plan.decodes.shape[0]:
        parts = None
        if plan.splits(keys.shape[2], window):
            shape = (plan.owners.shape[0], query.shape[1], keys.shape[3] + 2)  # sums, their weight and maximum
            parts = torch.empty(shape, dtype=torch.float32, device=query.device)
        tile = _fit(DECODE_TILES, width, plan.shared_bytes)
        kernel.decode(query, keys, values, out, parts, plan.decodes, plan.owners, plan.tables, scale, window, *tile)
    return out


def _fit(tiles: Sequence[tuple[int, int, int]], width: int, shared_bytes: int) -> tuple[int, int, int]:
    """Return the first tile whose keys and values fit, with 8 KiB left for the rest; the last if none does."""
    for tile in tiles:
        if 2 * tile[0] * tile[2] * width <= shared_bytes - 8192:
            return tile
    return tiles[-1]

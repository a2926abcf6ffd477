"""Paged attention through our Triton kernels: the backend of CUDA devices of compute capability 8.0 and above.

``plan`` turns a step into lists of integers, sent to the device in one copy; every layer reads them there.

    decodes   row, context length, start of its table, tokens in a chunk, first part     one token each
    owners    the decode of each part
    shared    first decode, decodes, number of the chunk     a chunk that several have in common
    pieces    first row, rows, position of the first, start of its table                 spans, cut into QUERY_TILE rows
    tables    the blocks of all requests, end to end

A decode's context is cut into chunks of MIN_CHUNK tokens, longer ones where that would make more than MAX_CHUNKS. If
there are enough decodes to keep the device busy, one program takes all chunks of a request in turn, and the longest
start first; if not, each chunk is a program (a *part*), and a second kernel adds the parts. A request's chunks depend
on its own context alone, and with tiles of one size and parts added in order the two ways give the same bits. Each way
has tiles of its own, though, for one wants many programs on a processor and the other few that load much at once, and
parts are added all at once: the last bits of a decode may depend on whether its step is cut, and so on how many others
there are.

Few decodes are cut into shorter chunks, SHORT_CHUNKS, and decodes whose tables begin with the same blocks have whole
chunks in common. Where it pays, the sums of such a chunk are computed for all of them at once, from keys and values
that are loaded once; contexts are then cut, whatever their number, and ``rest`` lists the parts that are left over.
Layers with a window share nothing. Both change last bits too.

    three requests, 2 chunks in common     [ one program ][ one program ][ a ][ a ]
                                                                         [ b ][ b ]
                                                                         [ c ]

The bits of a token of the prompt may differ too: alone in its span, it is a decode. Where the plan is told how long
prompts are, none of this is so. A token's place alone decides its kernel, in spans of any size, and decodes have one
tile and share nothing:

    prompt of 5 tokens    [ p p p p p | o o o ]
    span [2, 7)               [ p p p | o o ]      one piece of three rows, and two decodes of contexts 6 and 7
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.ops.attention import kernel

Integers = np.ndarray[Any, np.dtype[Any]]

PREFERRED_BLOCK_SIZE = 64
"""The kernels are as fast with 16; but the host handles every block of every request in each step."""

MIN_CHUNK, MAX_CHUNKS = 256, 64
"""Tokens, and chunks of a context unless there are so few requests that processors would be idle."""

ENOUGH_PROGRAMS = 4
"""For each processor, of steps with long contexts."""

FEW_CHUNKS = 8
"""Up to how many chunks of a request, on average, are best added one after the other."""

EARLY_DECODES = 1
"""How many decodes ask for keys and values before it is their turn: more of them have no bandwidth to spare."""

FRESH_DECODES = (2, 16)
"""How many decodes ``attend_fresh`` is for: with more, or one alone, what each program does to its queries takes longer
than the launch that is saved."""

SHORT_CHUNKS = {64: 2, 128: 3}
"""Tokens of the chunks of small steps, from the shortest, and up to how many programs for each processor they give."""

LEAST_MEMBERS, LEAST_SAVED = 4, 8192
"""Decodes that share their first chunks, and the tokens that need not be read again, from which on sharing pays: with
8 heads of 128 channels in 16 bits these weigh 32 MB, and take a large GPU as long as two small kernels."""

SHARED_BY = 64
"""Most decodes of a line of ``Plan.shared``."""

MOST_PARTS = 8192
"""Most parts of a step that shares, whose chunks grow until they are so few: of 16 heads of 128 channels, 68 MB."""

FLOAT8_CAPABILITY = (8, 9)
"""The lowest compute capability that has the type of a cache of float8."""

DETERMINISTIC = True
"""``plan`` takes ``prompt_lens``."""

MAX_HEAD_DIM = 256
"""The widest that the kernels have been run with."""

WORDS = 4
"""Lists begin at multiples of so many integers: a kernel is compiled anew for each list that lies otherwise."""

QUERY_TILE = 128
"""Rows of a piece: as many as two groups of four warps multiply at once."""

PROGRAMS_PER_PROCESSOR = 2
"""How many decodes of the longest context each processor must have for contexts to stay uncut."""

ROOM = 3
"""For how many programs with CUT_TILES a processor has room: up to so many of them take these, cut or not."""

DECODE_TILES = ((32, 4, 3, 128), (32, 4, 3), (32, 4, 2), (16, 4, 2))
"""Of contexts in one piece. Keys in a tile, warps, stages of the pipeline, and if that is to be limited, registers of a
thread: the first that fits into shared memory is taken."""

FLOAT8_TILES = ((64, 2, 3), (64, 2, 2), (32, 2, 2), (16, 4, 2))
"""Of contexts in one piece in a cache of float8: twice the keys are as many bytes, and half the warps share less work
that all of them do."""

LONG_TILES = ((32, 4, 4, 128), *DECODE_TILES)
"""Of the longest contexts, which are cut into long chunks."""

CUT_TILES = ((64, 4, 2), (32, 4, 2), (16, 4, 2))
"""Of contexts that are cut into the shortest chunks, of float8 too, and of few that are not. More stages would leave
room for fewer programs."""

SHARED_ROWS = 64
"""Queries that a program of a shared chunk multiplies at once."""

SHARED_TILES = ((64, 4, 3), (64, 4, 2), (32, 4, 2), (16, 4, 2))
"""Of shared chunks."""

PREFILL_TILES = ((64, 8, 3), (64, 8, 2), (32, 8, 2), (16, 8, 2))
"""Of spans of several tokens."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, as the kernels read it; made once, used by every layer."""

    decodes: Tensor
    """Int32 [decodes, 5], the longest context first."""
    owners: Tensor
    """Int32 [parts]: which decode a part belongs to, if contexts are cut."""
    rest: Tensor
    """Int32: the parts that are in no shared chunk, if there are any; -1 is padding."""
    shared: Tensor
    """Int32 [lines, 3]; a line of no decodes is padding."""
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
    chunk: int
    """Tokens of the shortest chunk."""
    cut: bool | None = None
    """Whether contexts are cut, where a CUDA graph has fixed that; None: as it suits each layer's window."""
    one_tile: bool = False
    """Whether contexts that are cut have the tile of those that are not."""

    def splits(self, kv_heads: int, window: int | None) -> bool:
        """Whether each chunk shall be a program: if they are many and whole contexts would leave processors idle."""
        if self.cut is not None:
            return self.cut
        longest = self.longest if window is None else min(self.longest, window)
        total = self.total if window is None else min(self.total, window * self.decodes.shape[0])
        if self.owners.shape[0] == self.decodes.shape[0]:
            return False
        return worth_cutting(longest, total, kv_heads, self.processors, self.chunk)


class Lists(NamedTuple):
    """The decodes of a step as ``Plan`` holds them."""

    decodes: Integers
    owners: Integers
    rest: Integers
    shared: Integers


def check(head_dim: int, block_size: int, dtype: torch.dtype) -> str:
    """Say why the kernels cannot serve this model and cache; empty if they can. All types of numbers will do."""
    if head_dim > MAX_HEAD_DIM:
        return f"triton's kernels take head dimensions up to {MAX_HEAD_DIM}, and this model's is {head_dim}"
    if block_size < 1:
        return f"triton's kernels need a block_size of at least 1, and it is {block_size}"
    return ""


def plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
    *,
    prompt_lens: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Plan:
    """Lay out a step for the kernels. Arguments have one entry for each request, in the order of its rows.

    ``prompt_lens``: where given, a request's rows have the same bits however its spans are cut and whatever comes with
    them. ``chunk``: tokens of the shortest chunk; None: MIN_CHUNK.
    """
    sizes, contexts = np.asarray(query_lens, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    counts = -(-contexts // block_size)
    rows, tables = np.cumsum(sizes) - sizes, np.cumsum(counts) - counts  # where those of each request start
    num_blocks = int(counts.sum())
    # a table may be longer than its context
    cut_tables = (table[:count] for table, count in zip(block_tables, counts.tolist(), strict=True))
    blocks = np.fromiter(chain.from_iterable(cut_tables), np.int32, num_blocks)

    # how many of a request's rows, its last ones, are decodes
    drawn = (sizes == 1).astype(np.int64) if prompt_lens is None else np.clip(contexts - prompt_lens, 0, sizes)
    early = sizes - drawn
    one, place = _number(drawn)
    ends = (contexts - drawn)[one] + place + 1  # each row sees what comes before it, and itself
    shares = prompt_lens is None
    chunk = chunk or MIN_CHUNK
    lists = lay_out((rows + early)[one] + place, ends, tables[one], blocks, block_size, chunk=chunk, shares=shares)

    span, piece = _number(-(-early // QUERY_TILE))
    done = piece * QUERY_TILE  # rows before each piece
    length = np.minimum(early[span] - done, QUERY_TILE)
    pieces = np.stack((rows[span] + done, length, contexts[span] - sizes[span] + done, tables[span]), axis=1)
    pieces = pieces[np.argsort(-(pieces[:, 1] + pieces[:, 2]), kind="stable")]

    on_gpu = device.type == "cuda"
    arrays = [each.ravel() for each in (*lists, pieces, blocks)]
    edges = np.cumsum([0, *(-(-len(array) // WORDS) * WORDS for array in arrays)]).tolist()
    # the allocator of pinned memory keeps the buffer until the copy is done
    packed = torch.empty(edges[-1], dtype=torch.int32, pin_memory=on_gpu)
    for start, array in zip(edges, arrays, strict=False):
        packed.numpy()[start : start + len(array)] = array
    there = packed.to(device, non_blocking=True)
    sent = [there[start : start + len(array)] for start, array in zip(edges, arrays, strict=False)]

    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    return Plan(
        decodes=sent[0].view(-1, 5),
        owners=sent[1],
        rest=sent[2],
        shared=sent[3].view(-1, 3),
        pieces=sent[4].view(-1, 4),
        tables=sent[5],
        longest=int(ends.max(initial=0)),
        total=int(ends.sum()),
        processors=properties.multi_processor_count if properties else 1,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 1 << 16) if properties else 1 << 20,
        chunk=chunk,
        one_tile=prompt_lens is not None,
    )


def _number(counts: Integers) -> tuple[Integers, Integers]:
    """Return ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2]) for counts of 2 and 3: whose each is, and its number there."""
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)


def worth_cutting(longest: int, total: int, kv_heads: int, processors: int, chunk: int) -> bool:
    """Whether decodes of ``total`` tokens would leave processors idle if the ``longest`` were one program a head."""
    return longest > chunk and kv_heads * total < PROGRAMS_PER_PROCESSOR * processors * longest


def shortest_chunk(contexts: Integers, kv_heads: int, processors: int) -> int:
    """Return the tokens of the shortest chunk that decodes with these contexts are best cut into."""
    for chunk, programs in SHORT_CHUNKS.items():
        if kv_heads * int((-(-contexts // chunk)).sum()) < programs * processors:
            return chunk
    return MIN_CHUNK


def most_chunks(number: int, kv_heads: int, processors: int) -> int:
    """Return how many chunks a context is cut into at most, in a step of ``number`` decodes."""
    return MAX_CHUNKS * (2 if number * kv_heads * MAX_CHUNKS <= ENOUGH_PROGRAMS * processors else 1)


def lay_out(
    rows: Integers,
    contexts: Integers,
    tables: Integers,
    blocks: Integers,
    block_size: int,
    *,
    chunk: int,
    shares: bool,
    most: int | None = None,
) -> Lists:
    """Return the lists of decodes: their rows, their contexts, and where in ``blocks`` their tables begin.

    ``chunk``: tokens of the shortest chunk; ``shares``: whether decodes may compute a chunk in common; ``most``: chunks
    of a context, None: MAX_CHUNKS.
    """
    order = np.argsort(-contexts, kind="stable")
    chunks = np.maximum(chunk, 2 ** np.ceil(np.log2(contexts / (most or MAX_CHUNKS)))).astype(np.int64)
    groups = find_groups(contexts[order], tables[order], chunks[order], blocks, block_size) if shares else []
    if groups:
        if (-(-contexts // chunks)).sum() > MOST_PARTS:
            return lay_out(rows, contexts, tables, blocks, block_size, chunk=2 * chunk, shares=True, most=most)
        alone = np.ones(len(order), bool)
        for members, _ in groups:
            alone[members] = False
        order = order[np.concatenate([*(members for members, _ in groups), np.flatnonzero(alone)])]
    rows, contexts, tables, chunks = rows[order], contexts[order], tables[order], chunks[order]
    counts = -(-contexts // chunks)
    parts = np.cumsum(counts) - counts
    decodes = np.stack((rows, contexts, tables, chunks, parts), axis=1)
    owners = np.repeat(np.arange(len(rows)), counts)
    if not groups:
        return Lists(decodes, owners, *_NOTHING_SHARED)

    depths = np.zeros(len(rows), np.int64)  # chunks that each decode shares
    shared, first = [], 0
    for members, depth in groups:
        depths[first : first + len(members)] = depth
        starts = np.arange(first, first + len(members), SHARED_BY)
        first += len(members)
        lines = np.empty((depth, len(starts), 3), np.int64)  # side by side: those that read the same keys
        lines[..., 0], lines[..., 1] = starts, np.minimum(first - starts, SHARED_BY)
        lines[..., 2] = np.arange(depth)[:, None]
        shared.append(lines.reshape(-1, 3))
    places = np.arange(len(owners)) - parts[owners]
    return Lists(decodes, owners, np.flatnonzero(places >= depths[owners]), np.concatenate(shared))


_NOTHING_SHARED = (np.empty(0, np.int64), np.empty((0, 3), np.int64))


def find_groups(
    contexts: Integers, tables: Integers, chunks: Integers, blocks: Integers, block_size: int
) -> list[tuple[Integers, int]]:
    """Return groups of decodes whose tables begin with the same blocks, each with its number of whole chunks in common.

    Contexts come longest first, ``chunks`` are the tokens of a chunk of each. A decode is in one group at most, and in
    none if its context is one chunk. Nested prefixes make one group, as deep and as large as saves most. Some 100 us
    for 256 requests of 30 blocks.
    """
    several = np.flatnonzero(contexts > chunks)
    if len(several) < LEAST_MEMBERS:
        return []
    # the last block of the first chunk: what follows on the same block need not have the same block there
    ends = blocks[tables[several] + (chunks[several] - 1) // block_size]
    keys = ends.astype(np.int64) << 32 | chunks[several]
    order = np.argsort(keys, kind="stable")
    edges = np.concatenate(([0], np.flatnonzero(np.diff(keys[order])) + 1, [len(order)]))
    groups, saved = [], 0
    for place in np.flatnonzero(np.diff(edges) >= LEAST_MEMBERS):
        members = several[order[edges[place] : edges[place + 1]]]
        chunk = int(chunks[members[0]])
        counts = contexts[members] // chunk * chunk  # tokens in whole chunks
        counts = -(-counts // block_size)  # and their blocks
        columns = np.arange(counts[0])
        found = blocks[tables[members, None] + np.minimum(columns, counts[:, None] - 1)]
        other = (found != found[0]) | (columns >= counts[:, None])
        alike = np.where(other.any(axis=1), other.argmax(axis=1), len(columns))  # blocks as those of the longest
        depths = np.minimum(alike * block_size, contexts[members]) // chunk
        ranked = np.sort(depths)[::-1]
        saves = ranked * np.arange(len(ranked))  # chunks, if all down to this one share as many as this one does
        saves[: LEAST_MEMBERS - 1] = 0
        best = int(saves.argmax())
        if saves[best]:
            groups.append((members[depths >= ranked[best]], int(ranked[best])))
            saved += int(saves[best]) * chunk
    return groups if saved >= LEAST_SAVED else []


def graph_plan(
    decodes: Tensor, owners: Tensor, rest: Tensor, shared: Tensor, tables: Tensor,
    *, longest: int, chunk: int, one_tile: bool = False,
) -> Plan:  # fmt: skip
    """Return a plan for a CUDA graph, of decodes alone, whose numbers change from replay to replay.

    A decode of context 0 is padding, and computes nothing. Contexts are cut if there are ``owners``; those that are
    left over belong to a decode of context 0, are -1 in ``rest`` and have no decodes in ``shared``; if that has lines,
    layers with a window do not cut. ``longest`` is that of the step it is recorded for, and matters only in so far as
    ``MIN_CHUNK * MAX_CHUNKS`` tokens are exceeded. ``one_tile`` is what ``plan`` does with ``prompt_lens``.
    """
    properties = torch.cuda.get_device_properties(decodes.device)
    return Plan(
        decodes=decodes,
        owners=owners,
        rest=rest,
        shared=shared,
        pieces=decodes.new_empty(0, 4),
        tables=tables,
        longest=longest,
        total=0,
        processors=properties.multi_processor_count,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", 1 << 16),
        chunk=chunk,
        cut=owners.shape[0] > 0 and shared.shape[0] == 0,
        one_tile=one_tile,
    )


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    scale: float,
    window: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See ``reference.attend``; the plan stands for its three index tensors.

    Channels must lie side by side; rows, heads and blocks may lie anywhere, keys and values in the same way. Those of
    float8 count times ``key_scales`` and ``value_scales``, float32 [kv_heads].
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    cache = (keys, values, key_scales, value_scales)
    if plan.pieces.shape[0]:
        width = _width(keys)
        tile = _fit(PREFILL_TILES, width, plan.shared_bytes - QUERY_TILE * width)
        kernel.prefill(query, *cache, out, plan.pieces, plan.tables, scale, softcap, window, QUERY_TILE, *tile)
    if plan.decodes.shape[0]:
        _decode(query, cache, kernel.Fresh(), out, plan, scale, softcap, window)
    return out


def attends_fresh(plan: Plan) -> bool:
    """Whether ``attend_fresh`` can take a plan whose decodes are one for each request, and is the faster way."""
    number = plan.decodes.shape[0] - (plan.owners.shape[0] > 0)  # if cut, one is padding
    fewest, most = FRESH_DECODES
    if plan.longest > MIN_CHUNK * MAX_CHUNKS:  # many programs
        return False
    return fewest <= number <= most and not (plan.pieces.shape[0] or plan.shared.shape[0] or plan.one_tile)


def attend_fresh(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    scale: float,
    window: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute ``rotate_and_store`` and ``attend`` in one, for a step in which each request computes its last token.

    The slot of a token is the one that its request's table gives. Saves a launch; the last bits of queries and keys may
    be others than ``rotate_and_store`` gives.
    """
    query = qkv[:, : -2 * keys.shape[2]]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    fresh = kernel.Fresh(q_norm, k_norm, eps, cos, sin)
    _decode(query, (keys, values, key_scales, value_scales), fresh, out, plan, scale, softcap, window)
    return out


def _decode(
    query: Tensor,
    cache: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    fresh: kernel.Fresh,
    out: Tensor,
    plan: Plan,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> None:
    keys, values, key_scales, _ = cache
    parts = rest = None
    kv_heads, number, width = keys.shape[2], plan.owners.shape[0], _width(keys)
    shares = window is None and plan.shared.shape[0] > 0
    if shares or plan.splits(kv_heads, window):
        shape = (number, query.shape[1], keys.shape[3] + 2)  # sums, their weight and maximum
        parts = torch.empty(shape, dtype=torch.float32, device=query.device)
    if shares:
        rest, number = plan.rest, plan.rest.shape[0]
        tile = _fit(SHARED_TILES, width, plan.shared_bytes - SHARED_ROWS * width)
        assert parts is not None
        kernel.sum_shared(
            query, keys, values, key_scales, parts, plan.decodes, plan.shared, plan.tables, scale, softcap, SHARED_BY,
            SHARED_ROWS, *tile,
        )  # fmt: skip
    programs = kv_heads * (plan.decodes.shape[0] if parts is None else number)
    tiles = _decode_tiles(plan, wide=keys.element_size() > 1, cut=parts is not None, shares=shares, programs=programs)
    early = parts is not None and plan.decodes.shape[0] <= EARLY_DECODES + 1  # one is padding
    ahead = plan.chunk if early and plan.chunk < MIN_CHUNK else 0
    ordered = plan.one_tile or plan.owners.shape[0] <= FEW_CHUNKS * plan.decodes.shape[0]
    kernel.decode(
        query, *cache, fresh, out, parts, plan.decodes, plan.owners, rest, plan.tables, scale, softcap, window, ahead,
        ordered, *_fit(tiles, width, plan.shared_bytes),
    )  # fmt: skip


def _decode_tiles(plan: Plan, *, wide: bool, cut: bool, shares: bool, programs: int) -> Sequence[tuple[int, ...]]:
    """Return the tiles for decodes, the best first. ``wide``: the cache is not of float8."""
    usual = DECODE_TILES if wide else FLOAT8_TILES
    few = programs <= ROOM * plan.processors
    if plan.one_tile or not (few or (cut and not shares)):
        return usual
    if not cut:
        return CUT_TILES if wide else usual
    if plan.longest > MIN_CHUNK * MAX_CHUNKS:
        return LONG_TILES if wide else usual
    return [tile for tile in CUT_TILES if tile[0] <= plan.chunk]


def _width(keys: Tensor) -> int:
    """Bytes of a key with its padding."""
    return keys.element_size() * (1 << (keys.shape[3] - 1).bit_length())


def _fit(tiles: Sequence[tuple[int, ...]], width: int, shared_bytes: int) -> tuple[int, ...]:
    """Return the first tile whose keys and values fit, with 8 KiB left for the rest; the last if none does."""
    for tile in tiles:
        if 2 * tile[0] * tile[2] * width <= shared_bytes - 8192:
            return tile
    return tiles[-1]

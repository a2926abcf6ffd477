"""A decode step as one CUDA graph: token look-up, model, head and sampler replayed by a single call.

Launching the kernels of a small model from Python takes longer than running them. So a step in which every request
computes one token is recorded once for each of a few numbers of rows, and replayed with other numbers:

    spans -> Message (pinned) --one copy--> Message (device) --replay--> tokens (device)

A step with fewer requests than its graph has rows fills the rest with rows of no context, which write nothing. Graphs
of plain steps are recorded when the engine is built, some 15 ms each; others when they are first needed, with those
that the same requests will need as they get fewer. They share their working memory, for one runs at a time.
"""

import logging
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch, Drawn
from nanovllm.kv_cache import KVCache
from nanovllm.ops.sample import choose
from nanovllm.ops.take_tokens import take_tokens
from nanovllm.sampler import Samples, filters, plain, sample, settings
from nanovllm.scheduler import Span

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 32), *range(256, 1025, 128))
"""Numbers of rows that graphs are recorded for: filling costs little, for products of 65 rows take as long as of 96."""

FIRST_ROWS = 256
"""Up to how many rows graphs are recorded before the first request comes."""

MOST_PARTS = 16_384
"""Most pieces that the contexts of a step are cut into; a step with more is computed uncut."""

SHARED_LINES, MOST_SHARED = 32, 2048
"""Least and most pieces that requests have in common; a step with more shares none."""

INTEGERS = ("sources", "positions", "slots", "lengths", "seeds")
NUMBERS = ("temperatures", "top_p", "min_p", "top_k")
"""float32, but for top_k, whose words hold an int32; in the order of ``sampler.settings``."""


class Message:
    """What differs from step to step, side by side in one piece of memory: pinned on the host, or on the device.

    sources, positions, slots, lengths, seeds int64 [rows]; temperatures, top_p, min_p float32 and top_k int32 [rows];
    shared int32 [MOST_SHARED, 3], rest and owners int32 [MOST_PARTS], decodes int32 [rows + 1 or more, 5] and tables
    int32 [rows * max_blocks] as the attention backend reads them. ``shared`` and ``rest`` come first and ``tables``
    last, so that a step copies no more of them than it uses.
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device | None = None) -> None:
        sizes = {"shared": 3 * MOST_SHARED, "rest": MOST_PARTS} | dict.fromkeys(INTEGERS, 2 * rows)
        sizes |= dict.fromkeys(NUMBERS, rows) | {"decodes": (rows // 4 + 1) * 4 * 5, "owners": MOST_PARTS}
        sizes["tables"] = rows * max_blocks
        words = sum(sizes.values())
        self.memory = torch.zeros(words, dtype=torch.int32, device=device, pin_memory=device is None)
        self.fields: dict[str, Tensor] = {}
        edge = 0
        for name, count in sizes.items():
            field = self.memory[edge : edge + count]
            dtype = torch.int64 if name in INTEGERS else torch.float32 if name in NUMBERS else torch.int32
            self.fields[name] = field.view(dtype)
            edge += count
        self.fields["decodes"] = self.fields["decodes"].view(-1, 5)
        self.fields["shared"] = self.fields["shared"].view(-1, 3)
        self.arrays = {name: field.numpy() for name, field in self.fields.items()} if device is None else {}
        self.lead = sizes["shared"] + sizes["rest"]
        """Words that only a step with something shared uses."""
        self.head = words - rows * max_blocks
        """Words in front of the tables."""


class Cuts(NamedTuple):
    """How contexts are cut, in numbers that are rounded up; all 0: not at all."""

    parts: int = 0
    """Pieces of contexts."""
    long: bool = False
    """Whether some context has longer pieces than the shortest."""
    chunk: int = 0
    """Tokens of the shortest piece."""
    rest: int = 0
    """Pieces that no two requests share, if some do share."""
    shared: int = 0
    """Pieces that several requests have in common."""


class Key(NamedTuple):
    """What a graph is recorded for."""

    rows: int
    cuts: Cuts
    samples: bool
    """Whether it ends with tokens, or with logits for those who need more than tokens."""
    filters: bool
    """Whether some row has top_k, top_p or min_p."""


class Recorded(NamedTuple):
    """A graph and where its result lies."""

    graph: torch.cuda.CUDAGraph
    result: Tensor


class DecodeGraphs:
    """Records and replays. ``backend`` offers what ``_cut`` asks of it, and ``graph_plan``, beside ``attend``."""

    def __init__(
        self, model: Any, cache: KVCache, backend: Any, *,
        max_requests: int, max_model_len: int, deterministic: bool = False, ahead: bool = True,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:  # fmt: skip
        self.model = model
        self.cache = cache
        self.backend = backend
        self.deterministic = deterministic
        self.ahead = ahead
        self.logprobs_mode = logprobs_mode
        self.sizes = [size for size in SIZES if size < max_requests]
        self.sizes.append(next((size for size in SIZES if size >= max_requests), SIZES[-1]))
        device, max_blocks = cache.data.device, -(-max_model_len // cache.block_size)
        self.drawn = Drawn(max(max_requests, self.sizes[-1]), device)
        self._there = Message(self.sizes[-1], max_blocks, device)
        # a step's message may still wait for its copy while the next one is written
        self._here = [Message(self.sizes[-1], max_blocks) for _ in range(3)]
        self._steps = 0
        self._recorded: dict[Key, Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def prepare(self) -> None:
        """Record what requests with ordinary parameters are going to need."""
        rows = max(size for size in self.sizes if size <= max(FIRST_ROWS, self.sizes[0]))
        self._record(Key(rows, Cuts(), samples=True, filters=False))

    def fits(self, spans: Sequence[Span]) -> bool:
        """Whether every request of a step computes one token and draws the next.

        If ``deterministic``, one that was drawn: a prompt's last one has other kernels.
        """
        if len(spans) > self.sizes[-1] or not all(span.samples and span.stop == span.start + 1 for span in spans):
            return False
        return not self.deterministic or all(span.start >= len(span.request.prompt_token_ids) for span in spans)

    def run(self, spans: Sequence[Span]) -> Samples:
        """Compute a step that ``fits``, and draw. The tokens may lie in memory that the next step overwrites."""
        params = [span.request.params for span in spans]
        chosen = all(map(plain, spans))
        rows = next(size for size in self.sizes if size >= len(spans))
        here = self._here[self._steps % len(self._here)]
        cuts, words = self._write(here, spans, rows)
        key = Key(rows, cuts, samples=chosen, filters=chosen and any(map(filters, params)))
        if key not in self._recorded:
            self._record(key)
        used = slice(0 if cuts.shared else here.lead, words)
        self._there.memory[used].copy_(here.memory[used], non_blocking=True)
        graph, result = self._recorded[key]
        graph.replay()
        self._steps += 1
        result = result[: len(spans)]
        return Samples(result, ()) if chosen else sample(result, spans, self.drawn, logprobs_mode=self.logprobs_mode)

    def _write(self, message: Message, spans: Sequence[Span], rows: int) -> tuple[Cuts, int]:
        """Fill in a message; return how contexts are cut, and its words."""
        number, block_size, drawn = len(spans), self.cache.block_size, self.drawn
        field = message.arrays
        contexts = np.fromiter((span.stop for span in spans), np.int64, number)
        requests = [span.request for span in spans]
        tables = [request.block_ids for request in requests]
        counts = np.fromiter(map(len, tables), np.int64, number)
        starts = np.cumsum(counts) - counts
        num_blocks = int(counts.sum())
        blocks = field["tables"][:num_blocks]
        blocks[:] = np.fromiter(chain.from_iterable(tables), np.int32, num_blocks)

        positions = contexts - 1
        field["sources"][:number] = [drawn.source(span) for span in spans]
        field["sources"][number:rows] = 0
        field["positions"][:number] = positions
        field["positions"][number:rows] = 0
        field["slots"][:number] = blocks[starts + positions // block_size] * block_size + positions % block_size
        field["slots"][number:rows] = -1
        seeds, lengths, numbers = settings(spans)
        field["seeds"][:number], field["lengths"][:number] = seeds, lengths
        for name, values in zip(NUMBERS, numbers.view(np.float32).reshape(len(NUMBERS), -1), strict=True):
            field[name][:number] = values

        return self._cut(field, contexts, starts, blocks, rows), message.head + num_blocks

    def _cut(self, field: dict[str, Any], contexts: Any, starts: Any, blocks: Any, rows: int) -> Cuts:
        """Fill in the lists of the attention backend, with padding up to what a graph is recorded for."""
        backend, number, kv_heads = self.backend, len(contexts), self.cache.data.shape[4]
        chunk, most = backend.MIN_CHUNK, None
        if not self.deterministic:
            chunk = backend.shortest_chunk(contexts, kv_heads, self._processors)
            most = backend.most_chunks(number, kv_heads, self._processors)
        decodes, owners, rest, shared = backend.lay_out(
            np.arange(number), contexts, starts, blocks, self.cache.block_size,
            chunk=chunk, shares=not self.deterministic, most=most,
        )  # fmt: skip
        field["decodes"][:number] = decodes
        field["decodes"][number : rows + 1] = 0
        longest = int(contexts.max())
        shares = len(shared) > 0
        cut = backend.worth_cutting(longest, int(contexts.sum()), kv_heads, self._processors, chunk)
        if not (cut or shares) or _at_least(len(owners), rows) > MOST_PARTS:
            return Cuts()
        # of the longest context matters whether it is cut into more than the shortest chunks
        cuts = Cuts(_at_least(len(owners), rows), longest > backend.MIN_CHUNK * backend.MAX_CHUNKS, chunk)
        shares = shares and _at_least(len(shared), SHARED_LINES) <= MOST_SHARED
        field["owners"][: len(owners)] = owners
        field["owners"][len(owners) : cuts.parts] = rows  # a decode of no context
        if shares:
            cuts = cuts._replace(rest=_at_least(len(rest), rows), shared=_at_least(len(shared), SHARED_LINES))
            field["rest"][: len(rest)] = rest
            field["rest"][len(rest) : cuts.rest] = -1
            field["shared"][: len(shared)] = shared
            field["shared"][len(shared) : cuts.shared] = 0
        return cuts

    def _record(self, needed: Key) -> None:
        """Record the step for a key, and what its requests need when they are fewer: then no step of theirs waits."""
        kv_heads, started = self.cache.data.shape[4], time.perf_counter()
        before = len(self._recorded)
        keys = [needed]  # the largest first: the others fit into its memory
        for rows in reversed([size for size in self.sizes if self.ahead and size <= needed.rows]):
            keys.append(needed._replace(rows=rows, cuts=Cuts()))
            if self.backend.worth_cutting(2**20, rows * 2**19, kv_heads, self._processors, 0):
                for parts in (8 * rows, 4 * rows):
                    keys.append(needed._replace(rows=rows, cuts=Cuts(parts, chunk=self.backend.MIN_CHUNK)))
        for key in keys:
            if key not in self._recorded:
                self._recorded[key] = self._record_one(key)
        logger.info("%d graphs in %.1f s", len(self._recorded) - before, time.perf_counter() - started)

    def _record_one(self, key: Key) -> Recorded:
        """Record the step for a key. Kernels that it is the first to need are compiled on the way."""
        field, rows, cuts = self._there.fields, key.rows, key.cuts
        # cut: one decode more, which is always padding
        decodes = field["decodes"][: rows + 1 if cuts.parts else rows]
        field["decodes"].zero_()
        field["shared"].zero_()
        field["slots"].fill_(-1)
        plan = self.backend.graph_plan(
            decodes, field["owners"][: cuts.parts], field["rest"][: cuts.rest], field["shared"][: cuts.shared],
            field["tables"], longest=cuts.long * 2**31, chunk=cuts.chunk, one_tile=self.deterministic,
        )  # fmt: skip

        def step() -> Tensor:
            batch = Batch(
                token_ids=take_tokens(field["sources"][:rows], self.drawn.tokens),
                positions=field["positions"][:rows],
                slot_mapping=field["slots"][:rows],
                sample_rows=field["positions"][:0],
                attend=self.backend.attend,
                plan=plan,
                attend_fresh=self.backend.attend_fresh if self.backend.attends_fresh(plan) else None,
            )
            logits: Tensor = self.model.logits(self.model(batch, self.cache))
            if not key.samples:
                return logits
            temperatures, top_p, min_p, top_k, seeds, lengths = (
                field[name][:rows] for name in (*NUMBERS, "seeds", "lengths")
            )
            tokens = choose(
                logits, temperatures, top_k.view(torch.int32), top_p, min_p, seeds, lengths, filtered=key.filters
            )
            self.drawn.tokens[:rows].copy_(tokens)
            return self.drawn.tokens

        graph = torch.cuda.CUDAGraph()
        # relaxed: to load a kernel that was just compiled is no part of the graph
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
            result = step()
        return Recorded(graph, result)


def _at_least(number: int, least: int) -> int:
    """Return the first of ``least``, 2 * ``least``, 4 * ``least``, ... that is not below ``number``."""
    while least < number:
        least *= 2
    return least

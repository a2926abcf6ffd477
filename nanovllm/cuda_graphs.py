"""A decode step as one CUDA graph: token look-up, model, head and sampler replayed by a single call.

Launching the kernels of a small model from Python takes longer than running them. So a step in which every request
computes one token is recorded once for each of a few numbers of rows, and replayed with other numbers:

    spans -> message (host) --> [ receive | look-up, model, head, sampler | deliver ] --> tokens (host and device)
                                  one replay

A step with fewer requests than its graph has rows fills the rest with rows of no context, which write nothing. Graphs
of plain steps are recorded when the engine is built, some 15 ms each; others when they are first needed, with those
that the same requests will need as they get fewer. They share their working memory, for one runs at a time.
"""

import logging
import time
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch, Drawn
from nanovllm.errors import ConfigError
from nanovllm.kv_cache import KVCache
from nanovllm.ops.exchange import deliver, receive
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

SLOTS = 3
"""A step's message may still wait to be read while the next one is written, and its tokens while the next are drawn."""

INTEGERS = ("sources", "positions", "slots", "lengths", "seeds")
NUMBERS = ("temperatures", "top_p", "min_p", "top_k")
"""float32, but for top_k, whose words hold an int32; in the order of ``sampler.settings``."""

WORDS = 4
"""Fields begin at multiples of so many words: kernels are compiled for that."""


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


def lay(rows: int, cuts: Cuts, max_blocks: int) -> dict[str, slice]:
    """Return where in a message, counted in words of 32 bits, the fields of a step lie.

    size [1], the words that are used; sources, positions, slots, lengths, seeds int64 [rows]; temperatures, top_p,
    min_p float32 and top_k int32 [rows]; decodes int32 [rows + 1, 5], owners, rest, shared [lines, 3] and tables
    [rows * max_blocks] as the attention backend reads them. ``tables`` come last, and mostly end early.
    """
    sizes = {"size": 1} | dict.fromkeys(INTEGERS, 2 * rows) | dict.fromkeys(NUMBERS, rows)
    sizes |= {"decodes": 5 * (rows + 1), "owners": cuts.parts, "rest": cuts.rest, "shared": 3 * cuts.shared}
    sizes["tables"] = rows * max_blocks
    fields, edge = {}, 0
    for name, count in sizes.items():
        fields[name] = slice(edge, edge + count)
        edge += -(-count // WORDS) * WORDS
    return fields


def split(words: Any, fields: dict[str, slice], library: Any) -> dict[str, Any]:
    """Return views of a message: ``words`` is an int32 array of ``library``, NumPy or PyTorch."""
    types = dict.fromkeys(INTEGERS, library.int64) | dict.fromkeys(NUMBERS[:-1], library.float32)
    views = {name: words[place].view(types.get(name, library.int32)) for name, place in fields.items()}
    return views | {"decodes": views["decodes"].reshape(-1, 5), "shared": views["shared"].reshape(-1, 3)}


class Recorded(NamedTuple):
    """A graph, and where its logits lie if it does not draw."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor | None


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
        device, self._max_blocks = cache.data.device, -(-max_model_len // cache.block_size)
        self.drawn = Drawn(max(max_requests, self.sizes[-1]), device)
        most = Cuts(MOST_PARTS, rest=MOST_PARTS, shared=MOST_SHARED)
        words = lay(self.sizes[-1], most, self._max_blocks)["tables"].stop
        self._message = torch.zeros(words, dtype=torch.int32, device=device)
        self._inbox = torch.zeros(SLOTS, words, dtype=torch.int32, pin_memory=True)
        self._outbox = torch.zeros(SLOTS, self.sizes[-1], dtype=torch.int64, pin_memory=True)
        self._turn = torch.zeros((), dtype=torch.int64, device=device)
        pairs = ((self._message[0], self._inbox[0, 0]), (self._turn, self._outbox[0, 0]))
        weakref.finalize(self, _let_go, pairs, torch.cuda.current_stream(device)).atexit = False
        self._views: dict[tuple[int, int, Cuts], tuple[dict[str, Any], int]] = {}
        self._steps: int | None = 0  # as the device counts them in ``_turn``; None: it alone knows
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
        """Compute a step that ``fits``, and draw. The tokens may lie in memory that is used anew ``SLOTS`` steps on."""
        chosen = all(map(plain, spans))
        rows = next(size for size in self.sizes if size >= len(spans))
        steps = int(self._turn) if self._steps is None else self._steps
        cuts = self._write(steps % SLOTS, spans, rows)
        key = Key(rows, cuts, samples=chosen, filters=chosen and any(filters(span.request.params) for span in spans))
        if key not in self._recorded:
            self._record(key)
        graph, logits = self._recorded[key]
        self._steps = None  # an exception now, a second Ctrl-C above all, leaves open whether the step has begun
        graph.replay()
        self._steps = steps + 1
        if logits is None:
            return Samples(self._outbox[steps % SLOTS, : len(spans)], ())
        return sample(logits[: len(spans)], spans, self.drawn, logprobs_mode=self.logprobs_mode)

    def _write(self, slot: int, spans: Sequence[Span], rows: int) -> Cuts:
        """Fill in the message of a step; return how contexts are cut."""
        number, block_size = len(spans), self.cache.block_size
        contexts = np.fromiter((span.stop for span in spans), np.int64, number)
        tables = [span.request.block_ids for span in spans]
        counts = np.fromiter(map(len, tables), np.int64, number)
        starts = np.cumsum(counts) - counts
        blocks = np.fromiter(chain.from_iterable(tables), np.int32, int(counts.sum()))
        cuts, lists = self._cut(contexts, starts, blocks, rows)
        key = (slot, rows, cuts)
        if key not in self._views:
            places = lay(rows, cuts, self._max_blocks)
            self._views[key] = split(self._inbox[slot].numpy(), places, np), places["tables"].start
        fields, head = self._views[key]

        positions = contexts - 1
        seeds, lengths, numbers = settings(spans)
        slots = blocks[starts + positions // block_size] * block_size + positions % block_size
        sources = [self.drawn.source(span) for span in spans]
        values = dict(zip(INTEGERS, (sources, positions, slots, lengths, seeds), strict=True))
        values |= dict(zip(NUMBERS, numbers.view(np.float32).reshape(len(NUMBERS), -1), strict=True))
        values["top_k"] = values["top_k"].view(np.int32)
        padding = {"slots": -1, "owners": rows, "rest": -1}  # owners: a decode of no context
        for name, array in (values | lists._asdict()).items():
            field = fields[name]
            field[: len(array)] = array[: len(field)]
            field[len(array) :] = padding.get(name, 0)
        fields["tables"][: len(blocks)] = blocks
        fields["size"][0] = head + len(blocks)
        return cuts

    def _cut(self, contexts: Any, starts: Any, blocks: Any, rows: int) -> tuple[Cuts, Any]:
        """Return how contexts are cut, in numbers rounded up to those that graphs are recorded for, and the lists."""
        backend, number, kv_heads = self.backend, len(contexts), self.cache.data.shape[4]
        chunk, most = backend.MIN_CHUNK, None
        if not self.deterministic:
            chunk = backend.shortest_chunk(contexts, kv_heads, self._processors)
            most = backend.most_chunks(number, kv_heads, self._processors)
        lists = backend.lay_out(
            np.arange(number), contexts, starts, blocks, self.cache.block_size,
            chunk=chunk, shares=not self.deterministic, most=most,
        )  # fmt: skip
        parts, longest = _at_least(len(lists.owners), rows), int(contexts.max())
        shares = len(lists.shared) > 0
        cut = backend.worth_cutting(longest, int(contexts.sum()), kv_heads, self._processors, chunk)
        if not (cut or shares) or parts > MOST_PARTS:
            return Cuts(), lists
        # of the longest context matters whether it is cut into more than the shortest chunks
        cuts = Cuts(parts, longest > backend.MIN_CHUNK * backend.MAX_CHUNKS, chunk)
        lines = _at_least(len(lists.shared), SHARED_LINES)
        if shares and lines <= MOST_SHARED:
            cuts = cuts._replace(rest=_at_least(len(lists.rest), rows), shared=lines)
        return cuts, lists

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
        rows, cuts = key.rows, key.cuts
        fields = lay(rows, cuts, self._max_blocks)
        message = self._message[: fields["tables"].stop]
        field = split(message, fields, torch)
        # cut: one decode more, which is always padding
        decodes = field["decodes"][: rows + 1 if cuts.parts else rows]
        plan = self.backend.graph_plan(
            decodes, field["owners"], field["rest"], field["shared"], field["tables"],
            longest=cuts.long * 2**31, chunk=cuts.chunk, one_tile=self.deterministic,
        )  # fmt: skip

        def step() -> Tensor | None:
            receive(self._inbox, self._turn, message)
            batch = Batch(
                token_ids=take_tokens(field["sources"], self.drawn.tokens),
                positions=field["positions"],
                slot_mapping=field["slots"],
                sample_rows=field["positions"][:0],
                attend=self.backend.attend,
                plan=plan,
                attend_fresh=self.backend.attend_fresh if self.backend.attends_fresh(plan) else None,
            )
            logits: Tensor = self.model.logits(self.model(batch, self.cache))
            tokens = None
            if key.samples:
                names = ("temperatures", "top_k", "top_p", "min_p", "seeds", "lengths")
                tokens = choose(logits, *(field[name] for name in names), filtered=key.filters)
            deliver(tokens, self.drawn.tokens, self._outbox, self._turn)
            return None if key.samples else logits

        graph = torch.cuda.CUDAGraph()
        try:  # relaxed: to load a kernel that was just compiled is no part of the graph
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="relaxed"):
                logits = step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # from the driver, or from what may not be recorded
            rule = f"CUDA graphs cannot be recorded here ({str(error).partition(chr(10))[0]}). Set enforce_eager=True."
            raise ConfigError(rule, parameter="enforce_eager", value=False) from error
        return Recorded(graph, logits)


def _let_go(pairs: Iterable[tuple[Tensor, Tensor]], stream: torch.cuda.Stream) -> None:
    """Keep the host's memory from others until the last step has ended: its allocator knows of copies, not of kernels.

    Not on whatever stream is the current one: another engine may be recording there.
    """
    with torch.cuda.stream(stream):
        for there, here in pairs:
            there.copy_(here, non_blocking=True)


def _at_least(number: int, least: int) -> int:
    """Return the first of ``least``, 2 * ``least``, 4 * ``least``, ... that is not below ``number``."""
    while least < number:
        least *= 2
    return least

"""The observer that records: it writes down decisions, tokens, times and blocks, and holds no tensor.

    on_decision   a step is added: spans, preempted, why the head waits, block events up to here
    on_step       its tokens and times are known: it becomes JSON, which is small, and so is counted exactly
    on_end        how and when a request ended

The block manager's journal does not say for whom a block was taken; a request's block table, before and after, does.
"""

import json
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime, timezone
from enum import Enum
from math import isfinite
from typing import Any

from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError
from nanovllm.observer import Observer, StepTimes
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import SchedulerOutput
from nanovllm.trace.recording import (
    CODES,
    DROPPED,
    EVICT,
    FORGET,
    FORMAT,
    FREE,
    HOLD,
    KNOW,
    NO_DRAW,
    NOBODY,
    TAKE,
    VERSION,
    Recording,
)

logger = logging.getLogger(__name__)

MAX_STEPS = 50_000
MAX_BYTES = 16 * 2**20
"""Of steps and requests as JSON; the texts of tokens come on top, at most one for each id of the vocabulary."""

MOST_CANDIDATES = 20
"""Of one drawn token, whatever the request asked for."""
MOST_ITEMS = 64
"""Longest list of a parameter that is written down."""

INTERRUPTED = "interrupted, and decided again"
UNSETTLED = "not settled when the recording ended"


class Step:
    """A step that is decided and not settled."""

    __slots__ = ("facts", "index", "output")

    def __init__(self, index: int, output: SchedulerOutput, facts: dict[str, Any]) -> None:
        self.index = index
        self.output = output
        self.facts = facts


class Recorder(Observer):
    """Records an engine: to be added to ``LLMEngine.observers`` while no request is alive.

    ``facts`` go into the recording's ``engine``. ``decode`` gives the text of one token. ``deliver`` gets the recording
    when the engine is closed. ``candidates``: whether what requests get as log-probabilities are some.

    Memory: ``max_bytes`` of JSON and ``max_steps`` steps. When either is reached, no more steps are recorded, which the
    log says once; those kept are complete, and ``dropped_steps`` counts the others. It records what is computed anyway
    and changes nothing: candidates only of requests that asked for ``logprobs``. Cost on the engine's thread: some
    two microseconds for each span, measured with 32 a step.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        facts: Mapping[str, Any] | None = None,
        decode: Callable[[int], str] | None = None,
        deliver: Callable[[Recording], None] | None = None,
        candidates: bool = True,
        max_steps: int = MAX_STEPS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if engine.has_unfinished_requests:
            raise EngineError("requests are under way, and a recording begins before they come. Let them finish first.")
        self._scheduler = engine.scheduler
        self._blocks = engine.scheduler.blocks
        self.decode = decode
        self._deliver = deliver
        self._candidates = candidates
        self._max_steps, self._max_bytes = max_steps, max_bytes
        self._lock = threading.RLock()  # the end of the process may close it while another thread steps the engine
        self._start = time.perf_counter()
        self.facts = {
            "block_size": self._blocks.block_size,
            "num_blocks": self._blocks.num_blocks,
            "max_num_batched_tokens": self._scheduler.max_num_batched_tokens,
            "enable_prefix_caching": self._blocks.enable_prefix_caching,
            **(facts or {}),
            "started": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self.requests: list[dict[str, Any]] = []
        """As in a recording, but that prompts are arrays."""
        self._alive: dict[Request, int] = {}
        self._tables: dict[Request, list[int]] = {}  # blocks of each when the journal was last read
        self._takers = [NOBODY] * self._blocks.num_blocks  # for whom a block was taken, while that one holds it
        self._held: dict[Request, None] = {}  # samples in no queue yet
        self.steps: list[str] = []
        """JSON of each; empty while it is under way."""
        self._under_way: deque[Step] = deque()
        self._ended_by: dict[Request, int] = {}  # the step whose decision, settling or failure ends it
        self._decided_end: set[Request] = set()
        self.ids: set[int] = set()
        """Tokens that occur."""
        self._events = self._inherited()
        self._num_bytes = 0
        self._full = self._closed = False
        self.dropped_steps = 0
        """Steps that came after the limit was reached."""
        self._blocks.journal = []

    def on_arrival(self, request: Request) -> None:
        """Write down who came, with what."""
        with self._writing():
            if not self._full:
                self._arrive(request)

    def on_decision(self, output: SchedulerOutput) -> None:
        """Write down what is computed next, and what became of blocks since the last time."""
        with self._writing():
            if not self._full and (self._num_bytes >= self._max_bytes or len(self.steps) >= self._max_steps):
                self._fill()
            if self._full:
                self.dropped_steps += bool(output.spans)
            else:
                self._decide(output)

    def on_step(self, output: SchedulerOutput, times: StepTimes) -> None:
        """Write down what a step drew, and when."""
        with self._writing():
            step = self._pop(output)
            if step is not None:
                self._read_journal()
                moments = (times.began, times.decided, times.submitted, times.awaited, times.computed, times.settled)
                self._settle(step, [self._at(moment) for moment in moments])
            elif self._full:  # a later one is settled, so those that are recorded and not settled never will be
                while self._under_way:
                    self._fail(self._under_way.popleft(), INTERRUPTED)
            self._leave_if_full()

    def on_failure(self, output: SchedulerOutput, error: Exception) -> None:
        """Write down that nothing came of a step, and why."""
        with self._writing():
            step = next((each for each in self._under_way if each.output is output), None)
            if step is not None:
                self._under_way.remove(step)
                self._read_journal()
                self._fail(step, f"{type(error).__name__}: {error}")
                self._leave_if_full()

    def on_end(self, request: Request) -> None:
        """Write down how a request ended."""
        with self._writing():
            self._read_journal()
            if request in self._alive and (not self._full or request in self._ended_by):
                self._end(request)

    def close(self) -> None:
        """Stop recording and deliver what there is. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._read_journal()
            while self._under_way:
                self._fail(self._under_way.popleft(), UNSETTLED)
            self._stop()
            if self._deliver is not None:
                self._deliver(self.recording())

    def recording(self) -> Recording:
        """Return what has been recorded; the recorder must be closed. Cost: reading its JSON again."""
        assert self._closed, "a recording is complete when the recorder is closed"
        decode = self.decode
        return {
            "format": FORMAT,
            "version": VERSION,
            "engine": self.facts,
            "texts": {} if decode is None else {str(token): decode(token) for token in sorted(self.ids)},
            "requests": [{**row, "prompt": list(row["prompt"])} for row in self.requests],
            "steps": json.loads(f"[{','.join(self.steps)}]"),
            "tail": self._events,
            "dropped_steps": self.dropped_steps,
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it nothing is written down, and so whoever steps the engine waits: look, copy, and go."""
        with self._lock:
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock; whatever goes wrong ends the recording, for a journal that nobody reads only grows."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._full, self._blocks.journal = True, None
                raise

    def _at(self, moment: float) -> int:
        return max(0, round((moment - self._start) * 1e6))

    def _now(self) -> int:
        return self._at(time.perf_counter())

    def _arrive(self, request: Request) -> None:
        place, step = len(self.requests), len(self.steps)
        held = any(request in samples for samples in self._scheduler.held.values()) if request.index else False
        row = {
            "id": request.request_id,
            "sample": request.index,
            "arrived": self._at(request.metrics.queued_ts),
            "before_step": step,
            "queued_step": None if held else step,
            "prompt": array("q", request.prompt_token_ids),
            "priority": request.priority,
            "rank": request.rank,
            "max_tokens": request.max_tokens,
            "params": told(request.params),
            "cached": 0,
            "ended": None,
            "end_step": None,
            "gone_step": None,
            "finish": None,
            "stop": None,
            "text": "",
        }
        self.requests.append(row)
        self._alive[request] = place
        if held:
            self._held[request] = None
        self.ids.update(request.prompt_token_ids)
        self._num_bytes += len(json.dumps({**row, "prompt": request.prompt_token_ids}))

    def _decide(self, output: SchedulerOutput) -> None:
        self._read_journal(output)
        if not (output.spans or output.preempted or output.finished):
            return
        index, places = len(self.steps), self._alive
        if self._held:
            still = {sample for samples in self._scheduler.held.values() for sample in samples}
            for request in [each for each in self._held if each not in still]:
                del self._held[request]
                if not request.is_finished:
                    self.requests[places[request]]["queued_step"] = index
        facts = {
            "spans": [[places[s.request], s.start, s.stop, DROPPED if s.samples else NO_DRAW] for s in output.spans],
            "preempted": [places[request] for request in output.preempted],
            "wait": self._reason(output),
            "blocks": self._events,
        }
        self._events = []
        self._ended_by |= dict.fromkeys(output.finished, index)
        self._decided_end.update(output.finished)
        self.steps.append("")
        now = self._now()
        if output.spans:
            self._under_way.append(Step(index, output, {"t": [now] * 6, **facts}))
        else:
            self._write(index, {"t": [now] * 6, **facts})

    def _reason(self, output: SchedulerOutput) -> str | None:
        """Return why the head of the queue was not admitted."""
        scheduler = self._scheduler
        if not scheduler.waiting:
            return None
        if output.preempted:
            return "preempted"
        if output.num_tokens >= scheduler.max_num_batched_tokens:
            return "budget"
        return "seqs" if len(scheduler.running) >= scheduler.max_running else "blocks"

    def _pop(self, output: SchedulerOutput) -> Step | None:
        """Return the step that has been settled; those before it never will be."""
        if all(step.output is not output for step in self._under_way):
            return None
        while (step := self._under_way.popleft()).output is not output:
            self._fail(step, INTERRUPTED)
        return step

    def _settle(self, step: Step, times: list[int]) -> None:
        facts, top = step.facts, {}
        facts["t"] = times
        for span, written in zip(step.output.spans, facts["spans"], strict=True):
            request = span.request
            if request.is_finished and request in self._alive:
                self._ended_by.setdefault(request, step.index)
            if span.samples and span.stop < len(request.token_ids):
                written[3] = request.token_ids[span.stop]
                self.ids.add(written[3])
                if self._candidates and request.params.num_logprobs is not None:
                    top[str(written[0])] = self._best(request, span.stop - len(request.prompt_token_ids))
        if top:
            facts["top"] = top
        self._write(step.index, facts)

    def _best(self, request: Request, place: int) -> list[tuple[int, float]]:
        found = request.logprobs[place].items()
        best = [(token, round(each.logprob, 4)) for token, each in found if isfinite(each.logprob)][:MOST_CANDIDATES]
        self.ids.update(token for token, _ in best)
        return best

    def _fail(self, step: Step, message: str) -> None:
        step.facts["failed"] = message
        if message not in (INTERRUPTED, UNSETTLED):  # of these nobody knows when it was
            step.facts["t"][3:] = [self._now()] * 3
            for span in step.output.spans:
                if not span.request.is_finished:
                    self._ended_by.setdefault(span.request, step.index)
        self._write(step.index, step.facts)

    def _write(self, index: int, facts: dict[str, Any]) -> None:
        self.steps[index] = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
        self._num_bytes += len(self.steps[index])

    def _end(self, request: Request) -> None:
        row, index = self.requests[self._alive[request]], len(self.steps)
        by = self._ended_by.pop(request, None)
        decided = request in self._decided_end
        self._decided_end.discard(request)
        row["ended"] = self._now()
        row["end_step"] = by if by is not None else index - 1 if index else None
        row["gone_step"] = by if decided else index
        row["finish"], row["stop"] = request.finish_reason, request.stop_reason
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Write down what there is of a request, and keep it no longer."""
        row = self.requests[self._alive.pop(request)]
        row["cached"] = request.num_cached_tokens
        row["text"] = "" if request.builder is None else request.builder.since(0)
        self._num_bytes += len(row["text"])
        self._tables.pop(request, None)
        self._held.pop(request, None)

    def _fill(self) -> None:
        self._full = True
        self._blocks.journal = None
        logger.warning(
            "the recording is full after %d steps, %d bytes: what comes now is not in it", len(self.steps),
            self._num_bytes,
        )  # fmt: skip
        self._leave_if_full()

    def _leave_if_full(self) -> None:
        """When the last recorded step is settled, keep nothing alive but those that it ends."""
        if self._full and not self._under_way:
            for request in [each for each in self._alive if each not in self._ended_by]:
                self._let_go(request)

    def _stop(self) -> None:
        self._full = True
        self._blocks.journal = None
        for request in list(self._alive):
            self._let_go(request)

    # --- whose blocks ---

    def _inherited(self) -> list[int]:
        """Return the events that make the books what they are now: those of pins, and of what is cached."""
        events: list[int] = []
        cached = [self._blocks._blocks[index] for index in self._blocks._cached]
        held = [block for block in self._blocks._blocks if block.ref_count]
        for block in held + cached:
            told = [TAKE, *[HOLD] * (block.ref_count - 1), *[KNOW] * (block.digest is not None)]
            for code in told if block.ref_count else [*told, FREE]:
                events += (code, block.index, NOBODY)
        return events

    def _read_journal(self, output: SchedulerOutput | None = None) -> None:
        """Move the journal into the events, with the request of each; ``output`` is the decision that has been made.

        Between two readings a request's table grows, or goes, or comes: so its length tells what happened. Pins come
        before a decision, so that requests own the last of the events that a block has had, and those that are admitted
        together theirs in the order of the spans.
        """
        journal = self._blocks.journal
        if not journal:
            return
        self._blocks.journal = []
        gained: dict[int, list[int]] = {}
        lost: dict[int, list[int]] = {}
        changed = [each for each in self._alive if len(each.block_ids) != len(self._tables.get(each, ()))]
        if output is not None and len(changed) > 1:
            order = {span.request: place for place, span in enumerate(output.spans)}
            changed.sort(key=lambda request: order.get(request, NOBODY))
        for request in changed:
            before, now, place = self._tables.get(request, []), request.block_ids, self._alive[request]
            for block in now[len(before) :]:
                gained.setdefault(block, []).append(place)
            for block in before[len(now) :]:
                lost.setdefault(block, []).append(place)
            self._tables[request] = list(now)
        owners, takes = [NOBODY] * len(journal), dict[int, int]()
        for i in range(len(journal) - 1, -1, -1):
            name, block = journal[i]
            code = CODES[name]
            if code in (TAKE, HOLD, FREE):
                whose = (lost if code == FREE else gained).get(block)
                owners[i] = whose.pop() if whose else NOBODY
            if code == TAKE:
                takes[block] = owners[i]
            elif code == EVICT:
                owners[i] = owners[i + 1] = takes.pop(block, NOBODY)
        takers, previous = self._takers, EVICT
        for (name, block), owner in zip(journal, owners, strict=True):
            code = CODES[name]
            if code == TAKE:
                takers[block] = owner
            elif code == KNOW or (code == FORGET and previous != EVICT):
                owner = takers[block]
            elif code == FREE and owner == takers[block]:
                takers[block] = NOBODY
            self._events += (code, block, owner)
            previous = code


def told(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults, as JSON can hold them."""
    found = {}
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        usual = [] if field.name in ("stop", "stop_token_ids", "bad_words") else field.default
        if value != usual:
            found[field.name] = plain(value)
    return found


def plain(value: Any) -> Any:
    """Return a parameter as JSON can hold it, and not longer than a few lines."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, dict)) and len(value) > MOST_ITEMS:
        return f"{len(value)} items"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return repr(value)[:1000]

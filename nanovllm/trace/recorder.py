"""The observer that records: it writes down decisions, tokens, times and blocks, and holds no tensor.

    on_decision   a step is added: whose spans, preempted, why the head waits, block events up to here
    on_step       its times are known; its tokens stand in its requests, and are fetched for many steps at once
    on_end        how and when a request ended

Whoever watches meanwhile waits for nobody and holds nobody up: what stands in the lists of the recorder is never
changed, only replaced (a request's row, the None of a step) or added to.
"""

import json
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import takewhile
from math import isfinite
from typing import Any

from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError
from nanovllm.observer import Observer, StepTimes
from nanovllm.request import Request, Status
from nanovllm.scheduler import SchedulerOutput, Span
from nanovllm.trace.ledger import Due, Ledger
from nanovllm.trace.params import told
from nanovllm.trace.recording import DROPPED, FORMAT, NO_DRAW, VERSION, Recording
from nanovllm.trace.step import Run, Step, num_digits

logger = logging.getLogger(__name__)

MAX_STEPS = 50_000
MAX_BYTES = 16 * 2**20
"""Of steps and requests as JSON; the texts of tokens come on top, at most one for each id of the vocabulary."""

MOST_CANDIDATES = 20
"""Of one drawn token, whatever the request asked for."""

INTERRUPTED = "interrupted, and decided again"
UNSETTLED = "not settled when the recording ended"

MOST_STEPS = 16
"""Steps whose tokens are fetched at once."""
SECONDS = 0.1
"""So long, more or less, a step that is settled may be unknown to those who watch."""


@dataclass(slots=True)
class Taken:
    """A step that is decided, or settled and not yet written down.

    It lets go of its decision once it is settled: thousands of spans that live on are work for the garbage collector.
    """

    index: int
    output: SchedulerOutput | None
    requests: list[Request]
    places: list[int]
    """Of each span."""
    until: int
    """The sum of where spans stop."""
    draws: bool
    """Whether all spans draw a token."""
    goes_on: bool
    """Whether it is the step before, one token on."""
    times: list[int]
    stops: list[int]
    """Where spans stop; where they start, and whether each draws, is kept of one that is settled and begins a run."""
    starts: list[int] = field(default_factory=list)
    each_draws: list[bool] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    """As ``Step`` takes it."""


class Recorder(Observer):
    """Records an engine: to be added to ``LLMEngine.observers`` while no request is alive.

    ``facts`` go into the recording's ``engine``. ``decode`` gives the text of one token. ``deliver`` gets the recorder
    when the engine is closed. ``candidates``: whether what requests get as log-probabilities are some.

    Memory: ``max_bytes`` of JSON and ``max_steps`` steps. When either is reached, no more steps are recorded, which the
    log says once; those kept are complete, and ``dropped_steps`` counts the others, ``prompt_tokens`` and
    ``drawn_tokens`` what they computed. It records what is computed anyway and changes nothing: candidates only of
    requests that asked for ``logprobs``. Cost on the engine's thread: bench/recording.py measures it.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        facts: Mapping[str, Any] | None = None,
        decode: Callable[[int], str] | None = None,
        deliver: Callable[["Recorder"], None] | None = None,
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
        """As in a recording, but that prompts are arrays. A row that changes is replaced by another one."""
        self.changes: list[int] = []
        """Which rows were replaced, in order, each as often as it was."""
        self._alive: dict[Request, int] = {}
        self._asked: set[Request] = set()  # for candidates
        self.steps: list[Step | None] = []
        """None while one is under way, or waits to be written down with others."""
        self._under_way: deque[Taken] = deque()
        self._run: list[Taken] = []  # settled ones of the same requests
        self._last: Taken | None = None  # of those that were decided
        self._written = 0  # when steps were written down last
        self._settled: Taken | None = None  # the last one
        self._ended_by: dict[Request, int] = {}  # the step whose decision, settling or failure ends it
        self._decided_end: set[Request] = set()
        self._ledger = Ledger(self._scheduler)
        self._due = Due(self._blocks.block_size)
        self._span_bytes = 0.0
        """Of a span as JSON, in the run that was measured last."""
        self._measure_next = 0  # at which step the next one is
        self._num_bytes = 0
        self._full = self._closed = False
        self.dropped_steps = 0
        """Steps that came after the limit was reached."""
        self.prompt_tokens = self.drawn_tokens = 0
        """Tokens of prompts that those steps computed, and tokens that they drew, as far as they are settled."""

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
                moments = (times.began, times.decided, times.submitted, times.awaited, times.computed, times.settled)
                self._settle(step, output, [self._at(moment) for moment in moments])
            elif self._full:  # a later one is settled, so those that are recorded and not settled never will be
                while self._under_way:
                    self._fail(self._under_way.popleft(), INTERRUPTED)
                self._count(output.spans)
            self._leave_if_full()

    def on_failure(self, output: SchedulerOutput, error: Exception) -> None:
        """Write down that nothing came of a step, and why."""
        with self._writing():
            step = next((each for each in self._under_way if each.output is output), None)
            if step is not None:
                self._under_way.remove(step)
                self._fail(step, f"{type(error).__name__}: {error}")
                self._leave_if_full()

    def on_end(self, request: Request) -> None:
        """Write down how a request ended."""
        with self._writing():
            if self._blocks.journal:
                done, settled = Status.FINISHED, self._settled
                ended = [] if settled is None else [each for each in settled.requests if each.status is done]
                self._ledger.read(self._alive, ended if request in ended else [request])
            self._flush()
            if request in self._alive and (not self._full or request in self._ended_by):
                self._end(request)

    def close(self) -> None:
        """Stop recording and deliver what there is. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ledger.read(self._alive)
            while self._under_way:
                self._fail(self._under_way.popleft(), UNSETTLED)
            self._flush()
            self._full, self._last, self._settled = True, None, None
            self._ledger.stop()
            for request in list(self._alive):
                self._let_go(request)
            if self._deliver is not None:
                self._deliver(self)

    def recording(self) -> Recording:
        """Return what has been recorded; the recorder must be closed. This is where it takes its form, and time."""
        assert self._closed, "a recording is complete when the recorder is closed"
        whole = self.steps.index(None) if None in self.steps else len(self.steps)  # less if writing one has failed
        decode, steps = self.decode, [step for step in self.steps[:whole] if step is not None]
        ids = set[int]().union(*(row["prompt"] for row in self.requests), *(step.ids() for step in steps))
        return {
            "format": FORMAT,
            "version": VERSION,
            "engine": self.facts,
            "texts": {} if decode is None else {str(token): decode(token) for token in sorted(ids)},
            "requests": [{**row, "prompt": row["prompt"].tolist()} for row in self.requests],
            "steps": [step.facts() for step in steps],
            "tail": self.tail,
            "dropped_steps": self.dropped_steps + len(self.steps) - whole,
        }

    @property
    def tail(self) -> list[int]:
        """What has become of blocks since the last step was decided."""
        return self._ledger.events

    def now(self) -> dict[str, float]:
        """Return what the engine does and has done since the recording is full. Any thread may ask, and waits for none.

        The engine may be amid a step: numbers of blocks may then be a few apart.
        """
        return {
            "seconds": round(time.perf_counter() - self._start, 3),
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "held": self._blocks.num_held,
            "cached": len(self._blocks._cached),
            "prompt_tokens": self.prompt_tokens,
            "drawn_tokens": self.drawn_tokens,
        }

    def flush(self) -> None:
        """Show those who watch what is settled; any thread may ask. Nothing happens while the engine writes."""
        if self._lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock; whatever goes wrong ends the recording, for a journal that nobody reads only grows."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._full = True
                self._ledger.stop()
                raise

    def _at(self, moment: float) -> int:
        return max(0, round((moment - self._start) * 1e6))

    def _now(self) -> int:
        return self._at(time.perf_counter())

    def _arrive(self, request: Request) -> None:
        place, step = len(self.requests), len(self.steps)
        prompt = array("i", request.prompt_token_ids)
        row = {
            "id": request.request_id,
            "sample": request.index,
            "arrived": self._at(request.metrics.queued_ts),
            "before_step": step,
            "queued_step": step,
            "prompt": prompt,
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
        if self._candidates and request.params.num_logprobs is not None:
            self._asked.add(request)
        self._num_bytes += len(json.dumps({**row, "prompt": []})) + len(prompt)
        self._num_bytes += int(num_digits(prompt).sum())

    def _decide(self, output: SchedulerOutput) -> None:
        last, step = self._last, self._take(output)
        self._ledger.read(self._alive, self._expected(step, output))
        if not (output.spans or output.preempted or output.finished):
            self._last = last
            return
        preempted = [self._alive[request] for request in output.preempted]
        step.rest = {"blocks": self._ledger.cut(), "preempted": preempted, "wait": self._reason(output)}
        self._ended_by |= dict.fromkeys(output.finished, step.index)
        self._decided_end.update(output.finished)
        self.steps.append(None)
        if output.spans:
            self._under_way.append(step)
        else:
            self._write([Step(Run([], [], [], []), 0, step.times, **step.rest)], step.index)

    def _take(self, output: SchedulerOutput) -> Taken:
        """Take down a decision; most are the one before, one token on.

        Where the same requests go on that have all drawn, each computes what it drew, and reaches one token further.
        But a decision may have been taken back and made again: then together they do not reach as far.
        """
        spans, last, times = output.spans, self._last, [self._now()] * 6
        requests, stops = [span.request for span in spans], [span.stop for span in spans]
        until = sum(stops)
        same = last is not None and requests == last.requests
        if last is not None and same and last.draws and until == last.until + len(spans):
            taken = Taken(len(self.steps), output, last.requests, last.places, until, True, True, times, stops)
        else:
            places, draws = [self._alive[request] for request in requests], all([span.samples for span in spans])
            taken = Taken(len(self.steps), output, requests, places, until, draws, False, times, stops)
        self._last = taken
        return taken

    def _expected(self, step: Taken, output: SchedulerOutput) -> list[Request]:
        """Return whose blocks this decision has probably changed.

        A request that decodes needs a block in every ``block_size``-th step, so all that do are kept by the step in
        which they do. Whether these explain what happened is the ledger's to find out.
        """
        gone = sorted(output.preempted + output.finished, key=self._alive.__getitem__)
        for request in gone:
            self._due.pop(request)
        # those that are admitted, or still at their prompts, stand at the end
        new = list(takewhile(lambda span: span.request not in self._due, reversed(output.spans)))[::-1]
        likely = gone + self._due.now() + [span.request for span in new]
        for span in new:
            if span.samples:
                self._due.add(span.request, span.stop)
        if output.spans:
            self._due.tick()
        return likely

    def _reason(self, output: SchedulerOutput) -> str | None:
        """Return why the head of the queue was not admitted."""
        scheduler = self._scheduler
        if not scheduler.waiting:
            return None
        if output.preempted:
            return "preempted"
        if scheduler.waiting[0] in output.passed:
            return "prefix"
        if output.num_tokens >= scheduler.max_num_batched_tokens:
            return "budget"
        return "seqs" if len(scheduler.running) >= scheduler.max_running else "blocks"

    def _pop(self, output: SchedulerOutput) -> Taken | None:
        """Return the step that has been settled; those before it never will be."""
        if all(step.output is not output for step in self._under_way):
            return None
        while (step := self._under_way.popleft()).output is not output:
            self._fail(step, INTERRUPTED)
        return step

    def _settle(self, step: Taken, output: SchedulerOutput, times: list[int]) -> None:
        step.times, self._settled = times, step
        if self._full:  # else who has ended is told next, and this step has done it
            for request in step.requests:
                if request.is_finished and request in self._alive:
                    self._ended_by.setdefault(request, step.index)
        spans, step.output = output.spans, None
        if self._asked:
            top = {}
            for span, place in zip(spans, step.places, strict=True):
                request = span.request
                if request in self._asked and span.samples and span.stop < len(request.token_ids):
                    top[str(place)] = best(request, span.stop - len(request.prompt_token_ids))
            step.rest["top"] = top
        run = self._run
        if run and not (step.goes_on and run[-1].index == step.index - 1):
            self._flush()
        if not self._run:
            step.starts, step.each_draws = columns(spans)
        self._run.append(step)
        if len(self._run) == MOST_STEPS or times[-1] - self._written > SECONDS * 1e6:
            self._flush()

    def _count(self, spans: Sequence[Span]) -> None:
        """Count what a settled step did that is not recorded."""
        prompts = [len(span.request.prompt_token_ids) for span in spans]
        pieces = [(span, end) for span, end in zip(spans, prompts, strict=True) if span.start < end]
        self.prompt_tokens += sum([min(span.stop, end) - span.start for span, end in pieces])
        # what was drawn stands in its request, unless that had ended or the numbers were none
        self.drawn_tokens += sum([span.samples and span.stop < len(span.request.token_ids) for span in spans])

    def _fail(self, step: Taken, message: str) -> None:
        assert step.output is not None, "a step that is settled has not failed"
        spans = step.output.spans
        starts, draws = columns(spans)
        if message not in (INTERRUPTED, UNSETTLED):  # of these nobody knows when it was
            step.times[3:] = [self._now()] * 3
            for span in spans:
                if not span.request.is_finished:
                    self._ended_by.setdefault(span.request, step.index)
        run = Run(step.places, starts, step.stops, [DROPPED if drew else NO_DRAW for drew in draws])
        self._write([Step(run, 0, step.times, **step.rest, failed=message)], step.index)
        self._due = Due(self._blocks.block_size)  # who computes it again is a step late

    def _flush(self) -> None:
        """Write down the steps that are settled, with what they drew: a token that is not known now never will be."""
        steps, self._run = self._run, []
        if steps:
            first, number = steps[0], len(steps)
            stops = first.stops
            if number == 1:
                tokens = [
                    NO_DRAW if not draw
                    else known[stop] if stop < len(known := request.token_ids)
                    else DROPPED for request, stop, draw in zip(first.requests, stops, first.each_draws, strict=True)
                ]  # fmt: skip
            else:
                tokens = []
                for request, stop in zip(first.requests, stops, strict=True):
                    drawn = request.token_ids[stop : stop + number]
                    tokens += drawn if len(drawn) == number else drawn + [DROPPED] * (number - len(drawn))
            run = Run(first.places, first.starts, stops, tokens, number)
            self._write([Step(run, place, step.times, **step.rest) for place, step in enumerate(steps)], first.index)
            self._written = steps[-1].times[-1]

    def _write(self, steps: list[Step], index: int) -> None:
        self.steps[index : index + len(steps)] = steps
        run = steps[0].run
        num_spans = run.num_spans * run.num_steps
        if num_spans and index >= self._measure_next:
            self._span_bytes, self._measure_next = run.num_bytes / num_spans, index + MOST_STEPS
        self._num_bytes += round(self._span_bytes * num_spans) + sum(step.num_bytes for step in steps)

    def _change(self, place: int, **facts: Any) -> None:
        self.requests[place] = {**self.requests[place], **facts}
        self.changes.append(place)

    def _end(self, request: Request) -> None:
        index, by = len(self.steps), self._ended_by.pop(request, None)
        if by is None and request.finish_reason != "abort" and self._settled is not None:
            by = self._settled.index  # of which the engine has told just before
        decided = request in self._decided_end
        self._decided_end.discard(request)
        self._let_go(
            request,
            ended=self._now(),
            end_step=by if by is not None else index - 1 if index else None,
            gone_step=by if decided else index,
            finish=request.finish_reason,
            stop=request.stop_reason,
        )

    def _let_go(self, request: Request, **facts: Any) -> None:
        """Write down what there is of a request, and keep it no longer."""
        text = "" if request.builder is None else request.builder.since(0)
        self._change(self._alive.pop(request), cached=request.num_cached_tokens, text=text, **facts)
        self._num_bytes += len(text)
        self._due.pop(request)
        self._asked.discard(request)

    def _fill(self) -> None:
        self._full = True
        self._ledger.stop()
        logger.warning(
            "the recording is full after %d steps, %d bytes: what comes now is not in it", len(self.steps),
            self._num_bytes,
        )  # fmt: skip
        self._leave_if_full()

    def _leave_if_full(self) -> None:
        """When the last recorded step is settled, keep nothing alive but those that it ends."""
        if self._full and not self._under_way:
            self._flush()
            self._last = self._settled = None
            for request in [each for each in self._alive if each not in self._ended_by]:
                self._let_go(request)


def columns(spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """Return where spans start, and whether they draw."""
    return [span.start for span in spans], [span.samples for span in spans]


def best(request: Request, place: int) -> list[list[int | float]]:
    """Return the candidates of a drawn token, itself first."""
    found = request.logprobs[place].items()
    return [[token, round(each.logprob, 4)] for token, each in found if isfinite(each.logprob)][:MOST_CANDIDATES]

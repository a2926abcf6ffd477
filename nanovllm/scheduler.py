"""What is computed next: which tokens of which requests, and who has to make room.

There are no phases. A request has tokens and a count of those computed; each step hands out a budget of tokens:
first to running requests that need one token (decode), then to running ones that need more (the rest of a
chunked prefill), then to waiting ones. A decode therefore never waits behind a long prompt.

Steps may overlap: a step can be decided while others are still under way. Then a request has pending tokens, which
exist but are not known, and ends one step late: what was computed of it meanwhile is dropped. A block that is
taken from a request under way may be given to another at once, for the device runs the steps in their order.

To change this file: a decision reads requests and block counts only, never the value of a token that is still
being computed; and it is a value (SchedulerOutput), so it can be logged, sent and tested without a model.
"""

import logging
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.block_manager import BlockManager
from nanovllm.request import Request, Sampled, Status

logger = logging.getLogger(__name__)

PATIENCE = 1000
"""How many steps of waiting make up for one level of priority."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[start, stop)`` of one request, to be computed in one step."""

    request: Request
    start: int
    stop: int
    samples: bool
    """Whether the next token is drawn after it: it reaches the end of what is known."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, decided. A value; nothing here acts."""

    spans: tuple[Span, ...]
    preempted: tuple[Request, ...] = ()
    """Lost their blocks, and wait again; they are computed anew, as far as the prefix cache does not help."""
    finished: tuple[Request, ...] = ()
    """Ended by the decision: no pool of blocks would let them go on."""
    spoiled: tuple[int, ...] = ()
    """Blocks to be filled with zeros first: a masked place adds 0 times what lies there, and 0 * NaN is NaN."""
    passed: tuple[Request, ...] = ()
    """Not admitted, though first in the queue: others compute what they can find soon."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(span.stop - span.start for span in self.spans)


class Scheduler:
    """Keeps the waiting queue and the running set, both in order of (rank, arrival).

    ``max_num_seqs`` bounds the running set, ``max_num_batched_tokens`` the tokens of a step. No more requests
    run than there are tokens in the budget, so each request that decodes gains a token in every step, and no step
    between two of its tokens computes more than ``max_num_batched_tokens``, however long the prompts are that come.
    Blocks that hold drawn tokens can be found by later prompts if ``share_outputs``.

    Policy "fcfs" takes requests as they came, "priority" by rank: ``priority * patience + step``, of the step when the
    request came. So a request is overtaken only by one that is d > 0 levels more urgent, and came less than d *
    ``patience`` steps later. Of those there is an end: some time a request is the first of all, is admitted before
    any other and never preempted again. Requests that come together go strictly by priority.

    One whose prompt is being computed, by half or more, by a running one before it is passed over until it can find
    that in the prefix cache: so what begins alike is computed once, though it comes together as samples of one prompt
    do. Its place among the running stays free, and whoever gets another is behind the one that it waits for.
    """

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, policy: str = "fcfs",
        share_outputs: bool = True, patience: int = PATIENCE,
    ) -> None:  # fmt: skip
        self.blocks = blocks
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_steps = 0
        self._spoiled: list[int] = []
        self._by_priority = policy == "priority"
        self._share_outputs = share_outputs
        self._patience = patience

    def add(self, request: Request, samples: Sequence[Request] = ()) -> None:
        """Queue a request, and ``samples`` of its prompt, behind those that go before them, now and for ever."""
        for each in (request, *samples):
            each.rank = (request.priority if self._by_priority else 0) * self._patience + self.num_steps
            insort(self.waiting, each, key=_order)

    def schedule(self) -> SchedulerOutput:
        """Decide one step. Requests' ``num_computed_tokens`` already count it; see ``undo``."""
        spans: list[Span] = []
        preempted: list[Request] = []
        finished: list[Request] = []
        budget = self.max_num_batched_tokens
        self.num_steps += 1

        # Only decodes need new blocks (admission takes a prompt's), so a victim, the last in order, is never
        # one that this step has already given a span.
        decodes = [request for request in self.running if request.num_uncomputed_tokens == 1]
        prefills = [request for request in self.running if request.num_uncomputed_tokens > 1]
        for request in decodes + prefills:
            if budget and request.status is Status.RUNNING:
                size = min(request.num_uncomputed_tokens, budget)
                if self._make_room(request, request.num_computed_tokens + size, preempted, finished):
                    spans.append(_span(request, size))
                    budget -= size

        coming: dict[bytes, tuple[int, ...]] = {}
        for request in self.running if self.waiting else ():
            self.blocks.announce(request, _order(request), coming)
        passed = 0
        while budget and passed < min(len(self.waiting), self.max_running - len(self.running)) and not preempted:
            request = self.waiting[passed]
            if coming and self.blocks.awaits(request, _order(request), coming):
                passed += 1
                continue
            # one block for each running request: so many can cross a block boundary before anyone is preempted
            if not self.blocks.admit(request, reserve=len(self.running)):
                if self.running:
                    break
                finished.append(self._end(request, "length"))
                continue
            del self.waiting[passed]
            request.status = Status.RUNNING
            insort(self.running, request, key=_order)
            if request.num_preemptions == 0:
                request.num_cached_tokens = request.num_computed_tokens
            self.blocks.announce(request, _order(request), coming)
            size = min(request.num_uncomputed_tokens, budget)
            spans.append(_span(request, size))
            budget -= size

        late = tuple(self.waiting[:passed])
        output = SchedulerOutput(tuple(spans), tuple(preempted), tuple(finished), tuple(self._spoiled), late)
        if spans:
            self._spoiled = []
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("step: %s", describe(output, waiting=len(self.waiting)))
        return output

    def update(self, output: SchedulerOutput, sampled: Sequence[Sampled | None]) -> list[Request]:
        """Book a computed step: append the drawn tokens, end what is done. Returns the requests that this ends.

        ``sampled`` has one entry for each span, None where it drew nothing and told nothing of a prompt.
        """
        finished: list[Request] = []
        for span, token in zip(output.spans, sampled, strict=True):
            request = span.request
            request.num_pending_tokens -= span.samples
            if request.is_finished:  # aborted while the step ran, or the step was decided before its end was known
                continue
            if token is not None and span.samples and token.token_id < 0:
                logger.warning("request %s ends: its logits after token %d hold NaN", request.request_id, span.stop)
                self._spoiled += self.blocks.forget(request)
                finished.append(self._end(request, "error"))
                continue
            if request.num_computed_tokens >= span.stop:  # else it was preempted meanwhile, and its blocks are gone
                known = span.stop if self._share_outputs else min(span.stop, len(request.prompt_token_ids))
                self.blocks.commit(request, known)
            if token is not None and token.prompt is not None:
                request.score(*token.prompt)
            if token is not None and span.samples:
                try:
                    request.append(token)
                except Exception:
                    logger.exception("request %s ends: its token %d became no text", request.request_id, token.token_id)
                    request.finish_reason = "error"
                if request.finish_reason is not None:
                    finished.append(self._end(request, request.finish_reason))
        return finished

    def undo(self, output: SchedulerOutput) -> None:
        """Take back a decision whose step was not computed, so that it can be made again."""
        self._spoiled += output.spoiled
        for span in output.spans:
            span.request.num_pending_tokens -= span.samples
            if not span.request.is_finished:
                span.request.num_computed_tokens = span.start

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request at once and take its blocks; nothing happens if it has ended already."""
        if not request.is_finished:
            self._end(request, reason)

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request], finished: list[Request]) -> bool:
        """Let ``request`` grow to ``num_tokens``, preempting from the end of the order; False if it had to go."""
        while not self.blocks.grow(request, num_tokens):
            if self.running == [request]:  # the whole pool is its own: nothing more will come
                if not request.num_pending_tokens:
                    finished.append(self._end(request, "length"))
                return False
            victim = self.running.pop()
            self.blocks.free(victim)
            victim.status = Status.WAITING
            victim.num_preemptions += 1
            self.num_preemptions += 1
            insort(self.waiting, victim, key=_order)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _end(self, request: Request, reason: str) -> Request:
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        self.blocks.free(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        try:
            if request.builder is not None:
                request.builder.finish()
        except Exception:
            logger.exception("request %s ends without the end of its text", request.request_id)
        logger.debug("request %s ends: %s", request.request_id, reason)
        return request


def _order(request: Request) -> tuple[int, int, int]:
    return request.rank, request.arrival, request.index


def _span(request: Request, size: int) -> Span:
    start, samples = request.num_computed_tokens, size == request.num_uncomputed_tokens
    request.num_computed_tokens = start + size
    request.num_pending_tokens += samples
    return Span(request, start, start + size, samples)


def describe(output: SchedulerOutput, *, waiting: int) -> str:
    """Say a decision in one line: ``3[0:64) 1[12:13)* preempted 4, waiting 2``; * draws a token."""
    parts = [f"{s.request.request_id}[{s.start}:{s.stop}){'*' if s.samples else ''}" for s in output.spans]
    parts += [f"preempted {request.request_id}" for request in output.preempted]
    parts += [f"ended {request.request_id}" for request in output.finished]
    return " ".join([*parts, f"waiting {waiting}"])

"""``data_parallel_size=N``: an LLMEngine that computes nothing itself, but sends each request to one of N replicas.

It checks requests, numbers them and draws their seeds as any engine does, before it is known where they go: so outputs
do not depend on N. What comes back is given out by ``step`` as a step's outputs are.
"""

import logging
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from nanovllm.admission import Limits
from nanovllm.config import EngineConfig
from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.parallel.balance import Balancer
from nanovllm.parallel.fleet import Fleet
from nanovllm.parallel.guard import PERIOD
from nanovllm.parallel.messages import write_params
from nanovllm.parallel.wire import Parts, read_prompt_rows, read_sample
from nanovllm.request import Request, Status

logger = logging.getLogger(__name__)

STEP_SECONDS = 0.02
"""Longest that ``step`` waits for news: a Ctrl-C, and what other threads want of the engine, wait as long."""


@dataclass(slots=True)
class Sent:
    """A request that a replica works on."""

    samples: list[Request]
    replica: int
    queued: int
    """Tokens that it still counts for in the replica's queue."""


@dataclass(slots=True)
class Work:
    """What a replica has been given and has done so far."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Of requests that have ended, and of what has been streamed."""
    cached_tokens: int = 0
    """Prompt tokens that it found in its prefix cache."""


class Pools:
    """Stands where an engine has its BlockManager: answers what may be asked of the replicas' caches as one."""

    def __init__(self, fleet: Fleet, config: EngineConfig, block_size: int, balancer: Balancer) -> None:
        self.num_blocks = fleet.num_blocks
        """Of the smallest cache: each request lives in one of them."""
        self.block_size = block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.sent: dict[int, Sent] = {}
        """What the replicas work on, by arrival number."""
        self._fleet, self._balancer = fleet, balancer

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens need."""
        return -(-num_tokens // self.block_size)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached anywhere; False, and nothing happens, while there are requests."""
        if self.sent:
            return False
        self._balancer.forget()
        return all([parts.text["reset"] for parts in self._fleet.ask({"reset": True})])


class Desk:
    """Stands where an engine has its Scheduler: sends requests to replicas, and knows where each of them is."""

    def __init__(self, fleet: Fleet, blocks: Pools, balancer: Balancer) -> None:
        self.blocks = blocks
        self.balancer = balancer
        self.work = [Work() for _ in range(fleet.size)]
        self._fleet = fleet

    def add(self, first: Request, others: Sequence[Request] = ()) -> None:
        """Send a request with all its samples."""
        tokens, salt = first.prompt_token_ids, first.cache_salt
        samples = 1 + len(others)
        cost = len(tokens) + first.max_tokens * samples
        replica = self.balancer.place(tokens, salt, cost, samples)
        self.blocks.sent[first.arrival] = Sent([first, *others], replica, cost)
        self.work[replica].requests += 1
        self.work[replica].prompt_tokens += len(tokens)
        params = write_params(replace(first.params, seed=first.seed))
        about = {"priority": first.priority, "cache_salt": salt, "stream": first.stream}
        came = [first.metrics.queued_ts, first.metrics.arrival_time]
        asked = {"key": first.arrival, "tokens": len(tokens), "params": params, "about": about, "came": came}
        self._fleet.send(replica, {"add": asked}, tokens)
        logger.debug("request %s: %d tokens to replica %d of queues %s", first.request_id, cost, replica,
                     self.balancer.queued)  # fmt: skip

    def progress(self, key: int, tokens: int, *, ended: bool) -> None:
        """Take off its queue what a request has computed, or all of it when it has ended."""
        sent = self.blocks.sent[key]
        done = sent.queued if ended else min(tokens, sent.queued)
        sent.queued -= done
        self.balancer.take_off(sent.replica, done, len(sent.samples) if ended else 0)
        if ended:
            del self.blocks.sent[key]


class Replicas(LLMEngine):
    """N engines behind the interface of one. Not thread-safe.

    Observers see requests come and end; steps are the replicas' own. The engine is lost as a whole: once a replica is,
    ``step`` raises EngineError with all requests, and ``add_request`` refuses more.
    """

    def __init__(self, config: EngineConfig, facts: Any, limits: Limits, **tools: Any) -> None:
        self._fleet = fleet = Fleet(config, facts)
        weakref.finalize(self, fleet.close)
        block_size = facts.block_size if config.enable_prefix_caching else 0
        balancer = Balancer(fleet.size, block_size, config.max_num_seqs)
        blocks = Pools(fleet, config, facts.block_size, balancer)
        self.desk = Desk(fleet, blocks, balancer)
        super().__init__(self.desk, None, limits, **tools)  # type: ignore[arg-type]  # it stands in, and none is needed
        self._sent = blocks.sent
        self._came: deque[RequestOutput | EngineError] = deque()  # not yet given out or raised, in the order of coming

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._requests or self._came)

    @property
    def work(self) -> list[Work]:
        """What each replica has been given and has done, as values."""
        return [replace(work) for work in self.desk.work]

    def told(self) -> list[Any]:
        """Return what each replica says that it has counted. Any thread may ask; raises EngineError if one is lost."""
        return self._fleet.ask_metrics()

    def add_request(self, *args: Any, **options: Any) -> Request:
        """See ``LLMEngine``. Raises EngineError if the engine is lost."""
        self._fleet.check()
        return super().add_request(*args, **options)

    def step(self) -> list[RequestOutput]:
        """Wait until a replica has news, or STEP_SECONDS; return what ended or streams. See ``LLMEngine``."""
        if not self._came:
            self._take(STEP_SECONDS)
        if self._came and isinstance(self._came[0], EngineError):
            self._forget(self._came[0].outputs)
            raise cast("EngineError", self._came.popleft())  # in no variable: its traceback would hold the engine
        news: list[RequestOutput] = []
        while self._came and isinstance(self._came[0], RequestOutput):
            news.append(cast("RequestOutput", self._came.popleft()))
        self._forget(news)
        return news

    def abort(self, request_id: str) -> RequestOutput | None:
        """See ``LLMEngine``. Waits for the replica, which answers between two of its steps."""
        if request_id not in self._requests:
            return None
        key = self._requests[request_id][0].arrival
        if key in self._sent:
            self._fleet.send(self._sent[key].replica, {"abort": key})
        while key in self._sent:
            self._take(PERIOD)
        del self._requests[request_id]
        pieces: list[RequestOutput] = []
        came, self._came = self._came, deque()
        for each in came:
            pile = each.outputs if isinstance(each, EngineError) else [each]
            pieces += (output for output in pile if output.request_id == request_id)
            pile[:] = [output for output in pile if output.request_id != request_id]
            if pile:  # else it is told to nobody: a failure concerns those whom it ended
                self._came.append(each)
        return joined(pieces)

    def close(self) -> None:
        """End the replicas."""
        super().close()
        self._fleet.close()

    def _take(self, seconds: float) -> None:
        """Wait for messages, and book them."""
        try:
            for _, parts in self._fleet.receive(seconds):
                self._book(parts)
        except EngineError as error:
            self._fleet.lose(str(error))
            self._came.append(self._loss(error))

    def _book(self, parts: Parts) -> None:
        text = parts.text
        if "refuse" in text:
            samples = self._sent[text["refuse"]].samples
            logger.error("request %s ends, for its replica refuses it: %s", samples[0].request_id, text["why"])
            self._came.append(self._broken_off(samples))
            return
        outputs = [self._read(written, parts) for written in text["outputs"]]
        parts.check_all_is_read()
        if text["failure"] is None:
            self._came += outputs
        else:
            self._came.append(EngineError(text["failure"], outputs=outputs))

    def _read(self, written: Sequence[Any], parts: Parts) -> RequestOutput:
        """Read an output, and write into its requests what is new of them."""
        key, finished, times, counts, prompt_rows, found = written
        if key not in self._sent:
            raise EngineError(f"a replica speaks of request {key}, which has ended; memory is damaged.")
        sent = self._sent[key]
        samples, first = sent.samples, sent.samples[0]
        begins = not any(request.num_output_tokens for request in samples)
        read_prompt_rows(prompt_rows, parts, first.prompt_logprobs)
        completions = [read_sample(each, parts, self._decode_token) for each in found]
        (scheduled, first_token, last_token), (generated, preempted, cached) = times, counts
        first.num_cached_tokens, first.num_preemptions = cached, preempted
        first.metrics = replace(
            first.metrics, scheduled_ts=scheduled, first_token_ts=first_token, last_token_ts=last_token,
            num_generation_tokens=generated, num_preemptions=preempted,
        )  # fmt: skip
        made = sum(len(each.token_ids) for each in completions)
        work = self.desk.work[sent.replica]
        work.output_tokens += made
        work.cached_tokens += cached if finished else 0
        self.desk.progress(key, made + (len(first.prompt_token_ids) if begins and made else 0), ended=finished)
        for each in completions:
            samples[each.index].token_ids += each.token_ids
            if each.finish_reason is not None:
                self._finish(samples[each.index], each.finish_reason, each.stop_reason)
        return self._given(samples, completions, finished=finished)

    def _given(
        self, samples: Sequence[Request], completions: Sequence[CompletionOutput], *, finished: bool
    ) -> RequestOutput:
        first = samples[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=list(completions),
            finished=finished,
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            metrics=first.metrics,
        )

    def _finish(self, request: Request, reason: str, stop: int | str | None = None) -> None:
        request.status, request.finish_reason, request.stop_reason = Status.FINISHED, reason, stop
        self._tell("on_end", request)

    def _broken_off(self, samples: Sequence[Request]) -> RequestOutput:
        """End a request of which nothing more is known."""
        self.desk.progress(samples[0].arrival, 0, ended=True)
        rest = [request for request in samples if not request.is_finished]
        for request in rest:
            self._finish(request, "error")
        ended = [CompletionOutput(request.index, "", [], finish_reason="error") for request in rest]
        return self._given(samples, ended, finished=True)

    def _loss(self, error: EngineError) -> EngineError:
        """End all requests; return what the caller is told."""
        return EngineError(str(error), outputs=[self._broken_off(each.samples) for each in [*self._sent.values()]])

    def _forget(self, outputs: Sequence[RequestOutput]) -> None:
        """Let the names of what has ended be used again."""
        for output in outputs:
            if output.finished:
                self._requests.pop(output.request_id, None)


def joined(pieces: Sequence[RequestOutput]) -> RequestOutput | None:
    """Return pieces of one request as one."""
    samples: dict[int, CompletionOutput] = {}
    for piece in pieces:
        for new in piece.outputs:
            old = samples.get(new.index)
            if old is not None:
                logprobs = None if new.logprobs is None else [*(old.logprobs or ()), *new.logprobs]
                new = replace(
                    new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs
                )  # fmt: skip
            samples[new.index] = new
    return replace(pieces[-1], outputs=[samples[index] for index in sorted(samples)]) if pieces else None

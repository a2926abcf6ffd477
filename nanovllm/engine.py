"""The loop: decide, compute, settle.

add_request --> Scheduler.schedule() --> ModelRunner.submit() --> Scheduler.update() --> RequestOutput
                      decide                  compute                  settle

On a GPU a step is decided and submitted while the one before it still runs, so that the device never waits for Python:

    device            | step 1      | step 2      | step 3
    host      decide 1, decide 2 .. settle 1, decide 3 .. settle 2, decide 4
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from nanovllm.admission import Able, Limits, check, encode_bad_words, expect, refuse
from nanovllm.errors import EngineError
from nanovllm.observer import Observer, StepTimes
from nanovllm.outputs import CompletionOutput, Logprobs, RequestOutput, Unscored
from nanovllm.request import Matcher, Request, Sampled, TextBuilder
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)


Fetch = Callable[[], Sequence[Sampled | None]]
"""Waits for a step; returns one entry for each span: what was found out, or None where that is nothing."""


class Runner(Protocol):
    """Computes decided steps, one after the other."""

    lookahead: int
    """How many steps may be under way when the next one is decided, 0 or 1. With more, a request could go on whose
    last token was drawn neither by the step before nor by one that is settled."""

    def submit(self, output: SchedulerOutput) -> Fetch:
        """Begin a step; return what waits for it."""


@dataclass(slots=True)
class Step:
    """A step under way."""

    output: SchedulerOutput
    fetch: Fetch
    began: float
    decided: float
    submitted: float


class LLMEngine:
    """Requests in, outputs out, one step at a time. Not thread-safe.

    ``LLM.llm_engine`` is one. Call ``add_request`` at any time, ``step`` while ``has_unfinished_requests``, and
    ``abort`` for what nobody wants any more; docs/requests.md has an example.

    ``make_builder`` returns what turns one request's tokens into text, ``decode_token`` the text of one token,
    ``encode`` the tokens of a text, without special ones; all None if only ids are wanted. ``make_matcher`` returns
    what holds a request to its ``structured_outputs``.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, limits: Limits, *,
        make_builder: Callable[[SamplingParams], TextBuilder] | None = None,
        decode_token: Callable[[int], str] | None = None,
        make_matcher: Callable[[SamplingParams], Matcher] | None = None,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.limits = limits
        self.observers: list[Observer] = []
        """Who watches; to be changed between steps only."""
        self._runner = runner
        self._make_builder = make_builder
        self._decode_token = decode_token
        self._make_matcher = make_matcher
        self._encode = encode
        self._requests: dict[str, list[Request]] = {}  # by name: the samples of one prompt, mostly one
        self._ended: list[Request] = []  # not yet given out
        self._streaming: dict[Request, None] = {}  # have something new that is not yet given out
        self._under_way: deque[Step] = deque()
        self._stalled = False  # a submission failed: settle what is under way before the next one
        self._arrivals = count()

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._requests)

    def add_request(
        self,
        request_id: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        stream: bool = False,
    ) -> Request:
        """Check a request and queue it. ``request_id=None`` draws an unused one.

        ``stream``: ``step`` gives out what is new after each token, else everything at the end. ``params.n`` samples
        of the prompt share its blocks; the first, which is returned, draws with the request's seed, number ``index``
        with ``sample_seed(seed, index)``.

        Raises RequestError, with the engine unchanged, if the request can never be served.
        """
        expect("params", params, SamplingParams, "must be SamplingParams")
        expect("prompt_token_ids", prompt_token_ids, Iterable, "must be a list of token ids")
        params = params.clone()
        tokens = list(prompt_token_ids)
        self.check(tokens, params, priority, cache_salt)
        if request_id is not None and (not isinstance(request_id, str) or request_id in self._requests):
            refuse("request_id", request_id, "must be a string that is not in use, or None to have one drawn")
        matchers: list[Matcher | None] = [None] * params.n
        if params.structured_outputs is not None and self._make_matcher is not None:
            matchers = [self._make_matcher(params) for _ in matchers]
        arrival = next(self._arrivals)
        if request_id is None:  # a caller's own names may be numbers too
            request_id = next(name for name in map(str, count(arrival)) if name not in self._requests)
        room = self.limits.max_model_len - len(tokens)
        seed = derive_seed(self.limits.seed, arrival) if params.seed is None else params.seed
        bad_words = encode_bad_words(params, self._encode)
        number = 0 if params.prompt_logprobs is None else 1 + (params.prompt_logprob_start or 0)
        unscored = Logprobs([Unscored()] * number, [0] * number, self._decode_token) if number else None
        samples = [
            Request(
                request_id=request_id, index=index, prompt=prompt, prompt_token_ids=tokens, params=params,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_token_ids=frozenset() if params.ignore_eos else self.limits.eos_token_ids,
                seed=sample_seed(seed, index), arrival=arrival, bad_words=bad_words, priority=priority,
                cache_salt=cache_salt, prompt_logprobs=unscored if index == 0 else None,
                builder=self._make_builder(params) if self._make_builder and params.detokenize else None,
                matcher=matcher, stream=stream,
            )
            for index, matcher in enumerate(matchers)
        ]  # fmt: skip
        self._requests[request_id] = samples
        now, wall = time.perf_counter(), time.time()
        for request in samples:
            request.metrics.queued_ts, request.metrics.arrival_time = now, wall
        self.scheduler.add(samples[0], samples[1:])
        for request in samples:
            self._tell("on_arrival", request)
        return samples[0]

    def step(self) -> list[RequestOutput]:
        """Decide and submit a step, settle the oldest one under way if there are enough; return what ended or streams.

        A request with ``n > 1`` is given out when all its samples have ended; one that streams, with the samples
        that have something new. Raises EngineError if the computation fails: the requests of that step have then
        ended (``error.outputs``), and the engine goes on with the others, also with the other samples of those. On
        any other exception (Ctrl-C) nothing is lost: the step goes on, or begins again.
        """
        if self._stalled or len(self._under_way) > self._runner.lookahead:  # the last step ended early
            self._settle_all()
        began = time.perf_counter()
        output = self.scheduler.schedule()
        decided = time.perf_counter()
        self._tell("on_decision", output)
        self._end(output.finished)
        if output.spans:
            self._submit(output, began, decided)
        if self._under_way and (not output.spans or len(self._under_way) > self._runner.lookahead):
            self._settle()
        news, self._ended, self._streaming = [*self._ended, *self._streaming], [], {}
        return self._give_out(news)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, all its samples, and return what it had; None if it is unknown or has ended already.

        If it streams: what is new, of the samples whose end was not given out before.
        """
        samples = self._requests.pop(request_id, None)
        if samples is None:
            return None
        news = [each for each in samples if not (each.stream and each.is_finished and each not in self._ended)]
        self._ended = [each for each in self._ended if each.request_id != request_id]
        for request in samples:
            self._streaming.pop(request, None)
            self._abort(request)
        return self._output(news, samples)

    def close(self) -> None:
        """Tell the observers that nothing more comes."""
        self._tell("close")
        self.observers.clear()

    def _tell(self, event: str, *facts: Any) -> None:
        for observer in tuple(self.observers):
            try:
                getattr(observer, event)(*facts)
            except Exception:
                logger.exception("%s failed in %s and is dismissed; the engine goes on", observer, event)
                self.observers.remove(observer)

    def _end(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._ended.append(request)
            self._tell("on_end", request)

    def _abort(self, request: Request, reason: str = "abort") -> None:
        if not request.is_finished:
            self.scheduler.abort(request, reason)
            self._tell("on_end", request)

    def _give_out(self, news: Sequence[Request]) -> list[RequestOutput]:
        """Build the outputs due now that these samples have ended or have something new."""
        changed: dict[str, dict[int, Request]] = {}
        for request in news:
            changed.setdefault(request.request_id, {})[request.index] = request
        outputs = []
        for request_id, new in changed.items():
            samples = self._requests[request_id]
            if all(request.is_finished for request in samples):
                del self._requests[request_id]
            elif not samples[0].stream:
                continue
            outputs.append(self._output([new[i] for i in sorted(new)] if samples[0].stream else samples, samples))
        return outputs

    def _submit(self, output: SchedulerOutput, began: float, decided: float) -> None:
        try:
            self._under_way.append(Step(output, self._runner.submit(output), began, decided, time.perf_counter()))
        except Exception as error:
            raise self._failure(output, error) from error
        except BaseException:
            self._stalled = True
            if not self._under_way or self._under_way[-1].output is not output:
                self.scheduler.undo(output)
            raise

    def _settle_all(self) -> None:
        while self._under_way:
            self._settle()
        self._stalled = False

    def _settle(self) -> None:
        """Wait for the oldest step under way, and book it."""
        step, awaited = self._under_way[0], time.perf_counter()
        output = step.output
        try:
            sampled = step.fetch()
        except Exception as error:
            self._under_way.popleft()
            raise self._failure(output, error) from error
        except BaseException:
            self._stalled = True
            raise
        computed = time.perf_counter()
        self._under_way.popleft()
        for span in output.spans:
            if not span.request.is_finished:
                times = span.request.metrics
                times.scheduled_ts = times.scheduled_ts or step.decided
                if span.samples:
                    times.first_token_ts = times.first_token_ts or computed
                    times.last_token_ts = computed
        ended = self.scheduler.update(output, sampled)
        settled = time.perf_counter()
        self._tell("on_step", output, StepTimes(step.began, step.decided, step.submitted, awaited, computed, settled))
        self._end(ended)
        on = (span.request for span in output.spans if span.samples and not span.request.is_finished)
        self._streaming |= {request: None for request in on if request.stream}

    def _failure(self, output: SchedulerOutput, error: Exception) -> EngineError:
        """End the requests of a step that failed; return what the caller is told, with what their other samples had."""
        self._stalled = True
        self._tell("on_failure", output, error)
        failed = [span.request for span in output.spans if not span.request.is_finished]
        for request in failed:
            self._abort(request, "error")
        names = {request.request_id for request in failed}
        news = [each for each in (*self._ended, *self._streaming, *failed) if each.request_id in names]
        self._ended = [each for each in self._ended if each.request_id not in names]
        self._streaming = {each: None for each in self._streaming if each.request_id not in names}
        on = "the engine is lost" if isinstance(error, EngineError) else "others, and new ones, can go on"
        return EngineError(
            f"a step of {output.num_tokens} tokens failed with {type(error).__name__}: {error}. Its "
            f"{len(output.spans)} requests have ended; {on}.",
            outputs=self._give_out(news),
        )

    def check(self, tokens: Sequence[int], params: SamplingParams, priority: object, cache_salt: object) -> None:
        """Raise RequestError if such a request can never be served. Changes nothing; any thread may ask."""
        able = Able(text=self._make_builder is not None, grammars=self._make_matcher is not None, encode=self._encode)
        check(tokens, params, priority, cache_salt, limits=self.limits, blocks=self.scheduler.blocks, able=able)

    def _output(self, news: Sequence[Request], samples: Sequence[Request]) -> RequestOutput:
        """Build what the caller gets of ``samples``: those of ``news``, by index."""
        first = samples[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=[self._completion(request) for request in news],
            finished=all(request.is_finished for request in samples),
            prompt_logprobs=first.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            metrics=first.current_metrics(),
        )

    def _completion(self, request: Request) -> CompletionOutput:
        """Build what the caller gets of one sample; if it streams only what is new since the last time."""
        text = "" if request.builder is None else request.builder.since(request.num_sent_chars)
        tokens = request.token_ids[len(request.prompt_token_ids) + request.num_sent_tokens :]
        logprobs = None
        if request.params.num_logprobs is not None:
            logprobs = request.logprobs.since(request.num_sent_tokens, self._decode_token)
            request.sent_logprob += logprobs.total()
        completion = CompletionOutput(
            index=request.index,
            text=text,
            token_ids=tokens,
            cumulative_logprob=request.sent_logprob if logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        if request.stream:
            request.num_sent_tokens = request.num_output_tokens
            request.num_sent_chars += len(text)
        return completion


def derive_seed(seed: int, arrival: int) -> int:
    """Mix the engine's seed and a request's number into a seed of 63 bits (the finaliser of SplitMix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + arrival + 1) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 29)) % 2**63


def sample_seed(seed: int, index: int) -> int:
    """Return the seed with which a sample gives alone what it gives as one of ``n``. The first has the request's."""
    return derive_seed(~seed, index) if index else seed

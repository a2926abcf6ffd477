"""A decided step as bytes, and the requests that a worker rebuilds from them.

    header     9 words: MAGIC, number of the step, then how many of each of the following
    dropped    1 word for each request that has ended: its slot
    spoiled    1 word for each block whose numbers must go
    spans      SPAN words for each span
    tokens     1 word for each token that became known since the request's last span, in the order of the spans
    blocks     1 word for each block it got since then
    text       JSON in UTF-8: for each request that is new what never changes, its sampling parameters above all

Words are int32 of the machine's order, for both ends are on one. Requests are named by slots, numbers that are used
again. A worker's mirror of a request has what the scheduler's had when it decided the step, so whatever computes a step
from requests needs to know nothing of ranks.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np

from nanovllm.errors import EngineError
from nanovllm.request import Matcher, Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import SchedulerOutput, Span

MAGIC = 0x6E765031
HEADER, SPAN = 9, 8
"""Words of the header, and of a span: slot, start, stop, whether it draws, new tokens, blocks kept, new blocks, and how
many entries its prompt log-probabilities have, -1 for none at all."""

HERE_ONLY = {"output_kind"}
"""Sampling parameters that change nothing of what is drawn, and are no JSON."""

DEFAULTS = SamplingParams()


@dataclass(slots=True)
class _Sent:
    """What workers know of a request."""

    slot: int
    tokens: int = 0
    block_ids: list[int] | None = None
    """The list of the request itself: a preempted one gets another."""
    blocks: int = 0


class Describer:
    """Turns decisions into bytes. Keeps what was said of each request that has not ended."""

    def __init__(self) -> None:
        self._sent: dict[Request, _Sent] = {}
        self._unused: list[int] = []
        self._steps = count()

    def describe(self, output: SchedulerOutput) -> bytes:
        """Return a step's bytes. They must be sent: the next ones build on them."""
        ended = [request for request in self._sent if request.is_finished]
        dropped = [self._sent.pop(request).slot for request in ended]
        self._unused += dropped  # workers drop them before they read what is new
        spans: list[int] = []
        tokens: list[int] = []
        blocks: list[int] = []
        news: list[dict[str, Any]] = []
        for span in output.spans:
            request = span.request
            sent = self._sent.get(request)
            if sent is None:
                sent = self._sent[request] = _Sent(self._unused.pop() if self._unused else len(self._sent))
                news.append({"slot": sent.slot, **_constants(request)})
            kept = sent.blocks if sent.block_ids is request.block_ids else 0
            fresh = request.token_ids[sent.tokens :]
            more = request.block_ids[kept:]
            told = -1 if request.prompt_logprobs is None else len(request.prompt_logprobs)
            spans += (sent.slot, span.start, span.stop, span.samples, len(fresh), kept, len(more), told)
            tokens += fresh
            blocks += more
            sent.tokens += len(fresh)
            sent.block_ids, sent.blocks = request.block_ids, kept + len(more)
        text = json.dumps(news).encode() if news else b""
        counts = (len(dropped), len(output.spoiled), len(output.spans), len(tokens), len(blocks), len(news), len(text))
        words = [MAGIC, next(self._steps) % 2**31, *counts, *dropped, *output.spoiled, *spans, *tokens, *blocks]
        return np.array(words, np.int32).tobytes() + text


class Mirror:
    """A worker's requests. ``grammars`` is called once, for the first request with ``structured_outputs``; it returns
    what makes matchers."""

    def __init__(self, grammars: Callable[[], Callable[[SamplingParams], Matcher]]) -> None:
        self._requests: dict[int, Request] = {}
        self._grammars = grammars
        self._make_matcher: Callable[[SamplingParams], Matcher] | None = None
        self._steps = count()

    def read(self, message: bytes) -> SchedulerOutput:
        """Return the step that ``Describer.describe`` said. Raises EngineError for bytes that are none."""
        text_at = len(message) // 4 * 4
        words = np.frombuffer(message[:text_at], np.int32)
        _check(len(words) >= HEADER and words[0] == MAGIC, "has no header")
        step = next(self._steps) % 2**31
        _check(words[1] == step, f"is number {words[1]}, not {step}")
        counts = [int(number) for number in words[2:HEADER]]
        num_dropped, num_spoiled, num_spans, num_tokens, num_blocks, num_news, num_text = counts
        edges = np.cumsum([HEADER, num_dropped, num_spoiled, num_spans * SPAN, num_tokens, num_blocks])
        _check(min(counts) >= 0 and 4 * int(edges[-1]) + num_text == len(message), f"is {len(message)} bytes long")
        dropped, spoiled, rows, tokens, blocks = (words[start:stop] for start, stop in pairwise(edges))
        spans = rows.reshape(-1, SPAN).tolist()
        news = json.loads(message[4 * int(edges[-1]) :]) if num_text else []
        _check(len(news) == num_news, f"has {len(news)} new requests, not {num_news}")
        _check(sum(span[4] for span in spans) == num_tokens, "has tokens that belong to no span")
        _check(sum(span[6] for span in spans) == num_blocks, "has blocks that belong to no span")
        for slot in dropped.tolist():
            _check(slot in self._requests, f"ends slot {slot}, which is unused")
            del self._requests[slot]
        firsts = {int(new["slot"]): new for new in news}
        _check(not firsts.keys() & self._requests.keys() and len(firsts) == num_news, "begins a slot that is in use")
        read = self._spans(spans, tokens.tolist(), blocks.tolist(), firsts)
        return SchedulerOutput(tuple(read), spoiled=tuple(spoiled.tolist()))

    def _spans(
        self, spans: list[list[int]], tokens: list[int], blocks: list[int], firsts: Mapping[int, Mapping[str, Any]]
    ) -> list[Span]:
        read = []
        token_at = block_at = 0
        for slot, start, stop, samples, num_tokens, kept, num_blocks, told in spans:
            fresh = tokens[token_at : token_at + num_tokens]
            if slot in firsts and slot not in self._requests:
                self._requests[slot] = self._begin(firsts[slot], fresh)
                fresh = fresh[firsts[slot]["prompt"] :]
            _check(slot in self._requests, f"has a span of slot {slot}, which is unused")
            request = self._requests[slot]
            for token in fresh:
                _append(request, token)
            _check(0 <= kept <= len(request.block_ids), f"keeps {kept} of {len(request.block_ids)} blocks")
            request.block_ids[kept:] = blocks[block_at : block_at + num_blocks]
            _check(0 <= start < stop, f"has a span [{start}, {stop})")
            entries: Any = None if told < 0 else range(told)  # of which only the number matters here
            request.prompt_logprobs = entries
            read.append(Span(request, start, stop, bool(samples)))
            token_at, block_at = token_at + num_tokens, block_at + num_blocks
        return read

    def _begin(self, new: Mapping[str, Any], tokens: list[int]) -> Request:
        params = read_params(new["params"])
        matcher = None
        if params.structured_outputs is not None:
            self._make_matcher = self._make_matcher or self._grammars()
            matcher = self._make_matcher(params)
        return Request(
            request_id=str(new["slot"]),
            prompt_token_ids=tokens[: new["prompt"]],
            params=params,
            max_tokens=new["max_tokens"],
            eos_token_ids=frozenset(new["eos_token_ids"]),
            seed=new["seed"],
            arrival=0,
            bad_words=tuple(map(tuple, new["bad_words"])),
            matcher=matcher,
        )


def _append(request: Request, token: int) -> None:
    """Add a token that was drawn; whether it ends the request is not decided here."""
    request.token_ids.append(token)
    if request.counts is not None:
        request.counts.add(token)
    if request.matcher is not None:
        request.matcher.accept(token)


def write_params(params: SamplingParams) -> dict[str, Any]:
    """Return what of them is not as it is by default, as JSON has it."""
    return {
        field.name: _plain(value)
        for field in fields(params)
        if field.name not in HERE_ONLY and (value := getattr(params, field.name)) != getattr(DEFAULTS, field.name)
    }


def read_params(written: Mapping[str, Any]) -> SamplingParams:
    """Return what ``write_params`` wrote, checked again."""
    asked = dict(written)
    if asked.get("logit_bias") is not None:
        asked["logit_bias"] = {token: bias for token, bias in asked["logit_bias"]}
    return SamplingParams(**asked)


def _constants(request: Request) -> dict[str, Any]:
    """Return what never changes of a request, as JSON has it."""
    return {
        "prompt": len(request.prompt_token_ids),
        "params": write_params(request.params),
        "max_tokens": request.max_tokens,
        "eos_token_ids": sorted(request.eos_token_ids),
        "seed": request.seed,
        "bad_words": request.bad_words,
    }


def _plain(value: object) -> object:
    """Return a parameter's value as JSON: an object's fields as a dict, a dict of ids as pairs."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: part for name, part in asdict(value).items() if part is not None}
    if isinstance(value, Mapping) and all(isinstance(key, int) for key in value):
        return list(value.items())
    return value


def _check(holds: object, what: str) -> None:
    if not holds:
        raise EngineError(f"a step's description {what}; ranks do not run the same code, or memory is damaged.")

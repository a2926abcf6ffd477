"""Logits to tokens: one draw for each request that reached its end in this step, by that request's own rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nanovllm.batch import Drawn, send
from nanovllm.ops.penalize import penalize
from nanovllm.ops.sample import choose, greedy, log_probs, processed
from nanovllm.ops.take_tokens import take_tokens
from nanovllm.outputs import Logprob
from nanovllm.request import Sampled
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Span


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step drew, where it was drawn: the host need not have waited for it."""

    tokens: Int64[Tensor, " rows"]
    """-1 where the logits held NaN."""
    numbers: Sequence[int | None]
    """How many log-probabilities each row asked for."""
    first: int = 0
    """The first row that asked for any."""
    logprobs: tuple[Tensor, ...] = ()
    """What ``log_probs`` says of the rows from ``first`` to the last that asked."""
    given: Sequence[list[int]] = ()
    """Ids that these rows asked for by name."""

    def to_host(self) -> "Samples":
        """Begin to copy it to the host; wait for the device before you read the copy."""
        tokens, *logprobs = (each.to("cpu", non_blocking=True) for each in (self.tokens, *self.logprobs))
        return Samples(tokens, self.numbers, self.first, tuple(logprobs), self.given)

    def sampled(self) -> list[Sampled]:
        """Return it as what requests keep, one entry for each row."""
        tokens: list[int] = self.tokens.tolist()
        if not self.logprobs:
            return [Sampled(token) for token in tokens]
        # copies: requests keep them for long, and the memory of a copy from the device is pinned
        arrays = (each.numpy(force=True).copy() for each in self.logprobs)
        scores = StepScores(tokens, self.numbers, self.first, self.given, *arrays)
        return [
            Sampled(token) if number is None else Sampled(token, scores, row)
            for row, (token, number) in enumerate(zip(tokens, self.numbers, strict=True))
        ]


@dataclass(frozen=True, slots=True, eq=False)
class StepScores:
    """The log-probabilities of one step, as they came from the device. Implements ``outputs.Scores``."""

    tokens: list[int]
    numbers: Sequence[int | None]
    first: int
    """Row of the step to which the first rows of the arrays belong."""
    given: Sequence[list[int]]
    owns: np.ndarray
    ranks: np.ndarray
    values: np.ndarray
    ids: np.ndarray
    named: np.ndarray

    def own(self, row: int) -> float:
        """Return the log-probability of the token drawn in a row."""
        return float(self.owns[row - self.first])

    def entry(self, row: int) -> dict[int, Logprob]:
        """Return the token drawn in a row, then the best ones that the row asked for, then those it named."""
        token, place = self.tokens[row], row - self.first
        best = slice(self.numbers[row])
        found = {token: Logprob(float(self.owns[place]), int(self.ranks[place]))}
        for rank, (value, other) in enumerate(
            zip(self.values[place, best].tolist(), self.ids[place, best].tolist(), strict=True), 1
        ):
            if other != token:
                found[other] = Logprob(value, rank)
        for other, value in zip(self.given[place], self.named[place].tolist(), strict=False):
            found.setdefault(other, Logprob(value))
        return found


def sample(
    logits: Float[Tensor, "rows vocab"], spans: Sequence[Span], drawn: Drawn | None = None,
    *, logprobs_mode: str = "raw_logprobs",
) -> Samples:  # fmt: skip
    """Draw the next token of each row; row i follows ``spans[i]``. No row changes another.

    Order, as in vLLM: grammars, allowed ids, banned ids, bias, penalties, temperature, min_p, top_k, top_p, draw.
    ``logprobs_mode`` says of which logits log-probabilities are: "raw_" ones, as they came, or "processed_" ones, as
    they were drawn from, with -inf for what filters dropped. "raw_logits" and "processed_logits" are these themselves.

    A request is read as of its span: more of it may be under way. ``drawn`` has the last tokens that the host does not
    know yet. On a GPU the host sends one message, one more where rows are ``adjusted`` and one for grammars, and waits
    for nothing, but for "processed_" log-probabilities of filtered rows.
    """
    params = [span.request.params for span in spans]
    drawing = not all(param.greedy for param in params)
    source = adjusted(logits, spans, drawn)
    filtered = any(filters(param) for param in params)
    if drawing:
        seeds, positions, words = send(settings(spans), logits.device)
        temperatures, top_p, min_p, top_k = words.view(torch.float32).view(4, -1)
        limits = (temperatures, top_k.view(torch.int32), top_p, min_p)
        tokens = choose(source, *limits, seeds, positions, filtered=filtered)
    else:
        tokens = greedy(source)
    asked = [row for row, param in enumerate(params) if param.num_logprobs is not None]
    if not asked:
        return Samples(tokens, ())
    rows = slice(asked[0], asked[-1] + 1)  # not those alone that asked: to pick them would copy their logits
    scored = logits[rows]
    if logprobs_mode.startswith("processed"):
        scored = source[rows]
        if drawing:
            scored = processed(scored, *(limit[rows] for limit in limits))
    vocab = logits.shape[1]
    numbers = [vocab if param.num_logprobs == -1 else param.num_logprobs for param in params]
    given = [list(param.logprob_token_ids or ()) for param in params[rows]]
    width = max(map(len, given))
    more = np.array([ids + [0] * (width - len(ids)) for ids in given], np.int64).reshape(-1)
    ids = send([more], logits.device)[0].view(-1, width) if width else None
    found = log_probs(
        scored, tokens[rows], max(number or 0 for number in numbers), ids,
        normalized=logprobs_mode.endswith("logprobs"),
    )  # fmt: skip
    return Samples(tokens, numbers, asked[0], found, given)


def adjusted(logits: Float[Tensor, "rows vocab"], spans: Sequence[Span], drawn: Drawn | None) -> Tensor:
    """Return logits with what single requests want of single tokens; those given, if no request wants any.

    Otherwise a copy in float32, for a penalty is less than the distance of 16-bit numbers.
    """
    if not any(map(adjusts, spans)):
        return logits
    logits = logits.to(torch.float32, copy=True)
    matcher = next((span.request.matcher for span in spans if span.request.matcher is not None), None)
    if matcher is not None:  # it knows of the others, and of banned ids
        matcher.mask(logits, spans)
    allowed = [(row, token) for row, span in enumerate(spans) for token in span.request.params.allowed_token_ids or ()]
    banned = [(row, token) for row, span in enumerate(spans) if not span.request.matcher
              for token in span.request.banned(span.stop)]  # fmt: skip
    suspects = [(row, *pair) for row, span in enumerate(spans) for pair in unsettled_bans(span)]
    biases = [
        (row, token, bias)
        for row, span in enumerate(spans)
        for token, bias in (span.request.params.logit_bias or {}).items()
    ]
    penalized = [row for row, span in enumerate(spans) if span.request.params.penalizes]
    counts = [spans[row].request.counts_until(spans[row].stop).words for row in penalized]
    strengths = [spans[row].request.params.penalties for row in penalized]
    parts = [
        *_columns(allowed, 2), *_columns(banned, 2), *_columns(suspects, 3),
        *_columns([(row, token) for row, token, _ in biases], 2), _bits([bias for *_, bias in biases]),
        np.array(penalized, np.int64), np.concatenate([np.empty(0, np.int64), *counts], dtype=np.int64),
        np.cumsum([0, *map(len, counts)], dtype=np.int64), _bits(strengths),
        np.array([_unknown(span, drawn) for span in spans], np.int64),
    ]  # fmt: skip
    sent = send(parts, logits.device)
    pending = sent[-1] if drawn is None else take_tokens(sent[-1], drawn.tokens)
    nothing = logits.new_full((), -torch.inf)

    at = (sent[0], sent[1])
    if allowed:
        kept = logits[at]
        logits.index_put_(at[:1], nothing)
        logits.index_put_(at, kept)
    if banned:
        logits.index_put_((sent[2], sent[3]), nothing)
    if suspects:
        rows, tokens, before = sent[4:7]
        hits = torch.where(pending[rows] == before, nothing, 0.0)
        logits.index_put_((rows, tokens), hits, accumulate=True)  # several may name one token
    if biases:
        at = (sent[7], sent[8])
        logits.index_put_(at, logits[at] + sent[9].view(torch.float64).float())
    if penalized:
        rows, words, edges, bits = sent[10:14]
        numbers = bits.view(torch.float64).float().view(-1, 3).T.contiguous()
        penalize(logits, rows, words, edges, pending[rows], numbers)
    return logits


NO_TOKEN = 2**40
"""In the place of a token that is not there; no vocabulary is so large."""


def _unknown(span: Span, drawn: Drawn | None) -> int:
    """Return what ``take_tokens`` makes the last token of a span from, if it matters and the host does not know it."""
    if known(span) or not span.request.adjusts:
        return NO_TOKEN
    assert drawn is not None, "the step before drew it"
    return drawn.source(span)


def adjusts(span: Span) -> bool:
    """Whether a request's next token is drawn from other logits than the model's."""
    return span.request.adjusts or span.request.too_short(span.stop)


def plain(span: Span) -> bool:
    """Whether a request wants nothing but to have its token chosen: no other logits, and no log-probabilities."""
    return span.request.params.num_logprobs is None and not adjusts(span)


def known(span: Span) -> bool:
    """Whether the host knows the last token of a span."""
    return span.stop <= len(span.request.token_ids)


def _columns(rows: Sequence[tuple[int, ...]], number: int) -> list[np.ndarray]:
    return list(np.array(rows, np.int64).reshape(-1, number).T)


def _bits(numbers: Sequence[object]) -> np.ndarray:
    """Return float64 numbers as the int64 that ``send`` takes."""
    return np.array(numbers, np.float64).reshape(-1).view(np.int64)


def settings(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return seeds, positions, and in the words of the third temperatures, top_p, min_p (float32) and top_k (int32)."""
    params = [span.request.params for span in spans]
    numbers = np.empty((4, len(spans)), np.float32)
    numbers[0] = [0.0 if param.greedy else param.temperature for param in params]
    numbers[1] = [param.top_p for param in params]
    numbers[2] = [param.min_p for param in params]
    numbers[3].view(np.int32)[:] = [min(max(param.top_k, 0), 2**31 - 1) for param in params]
    seeds = np.array([span.request.seed for span in spans], np.int64)
    positions = np.array([span.stop for span in spans], np.int64)
    return seeds, positions, numbers.reshape(-1).view(np.int64)


def filters(params: SamplingParams) -> bool:
    """Whether a request draws from less than the whole vocabulary."""
    return not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def unsettled_bans(span: Span) -> list[tuple[int, int]]:
    """Pairs of ids: the first must not be drawn if the second is the span's last token, which nobody here knows yet."""
    if known(span):
        return []
    words = (word for word in span.request.bad_words if len(word) > 1)
    return [(word[-1], word[-2]) for word in words if span.request.ends_with(word[:-2], span.stop - 1)]

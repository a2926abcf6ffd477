"""Logits to tokens: one draw for each request that reached its end in this step, by that request's own rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nanovllm.batch import send
from nanovllm.ops.sample import choose, greedy, log_probs
from nanovllm.outputs import Logprob
from nanovllm.request import Sampled
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Span


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step drew, where it was drawn: the host need not have waited for it."""

    tokens: Int64[Tensor, " rows"]
    numbers: Sequence[int | None]
    """How many log-probabilities each row asked for."""
    first: int = 0
    """The first row that asked for any."""
    logprobs: tuple[Tensor, ...] = ()
    """What ``log_probs`` says of the rows from ``first`` to the last that asked."""

    def to_host(self) -> "Samples":
        """Begin to copy it to the host; wait for the device before you read the copy."""
        tokens, *logprobs = (each.to("cpu", non_blocking=True) for each in (self.tokens, *self.logprobs))
        return Samples(tokens, self.numbers, self.first, tuple(logprobs))

    def sampled(self) -> list[Sampled]:
        """Return it as what requests keep, one entry for each row."""
        tokens: list[int] = self.tokens.tolist()
        if not self.logprobs:
            return [Sampled(token) for token in tokens]
        # copies: requests keep them for long, and the memory of a copy from the device is pinned
        own, ranks, values, ids = (each.numpy(force=True).copy() for each in self.logprobs)
        scores = StepScores(tokens, self.numbers, self.first, own, ranks, values, ids)
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
    owns: np.ndarray
    ranks: np.ndarray
    values: np.ndarray
    ids: np.ndarray

    def own(self, row: int) -> float:
        """Return the log-probability of the token drawn in a row."""
        return float(self.owns[row - self.first])

    def entry(self, row: int) -> dict[int, Logprob]:
        """Return the token drawn in a row, then the best ones that the row asked for, without the drawn one."""
        token, place = self.tokens[row], row - self.first
        best = slice(self.numbers[row])
        found = {token: Logprob(float(self.owns[place]), int(self.ranks[place]))}
        for rank, (value, other) in enumerate(
            zip(self.values[place, best].tolist(), self.ids[place, best].tolist(), strict=True), 1
        ):
            if other != token:
                found[other] = Logprob(value, rank)
        return found


def sample(logits: Float[Tensor, "rows vocab"], spans: Sequence[Span]) -> Samples:
    """Draw the next token of each row; row i follows ``spans[i]``. No row changes another.

    Order, as in vLLM: banned ids, temperature, min_p, top_k, top_p, draw. Log-probabilities are those of the unchanged
    logits. A request is read as of its span: more of it may be under way. On a GPU the host sends one message, and
    waits for nothing.
    """
    params = [span.request.params for span in spans]
    parts: list[np.ndarray] = []
    drawing = not all(param.greedy for param in params)
    if drawing:
        parts += settings(spans)
    banned = [(row, token) for row, span in enumerate(spans) for token in banned_token_ids(span)]
    if banned:
        parts += list(np.array(banned, np.int64).T)
    sent = send(parts, logits.device) if parts else []
    allowed = logits
    if banned:
        allowed = logits.index_put((sent[-2], sent[-1]), logits.new_full((), -torch.inf))
    if drawing:
        seeds, positions, words = sent[:3]
        numbers = words.view(torch.float32).view(4, -1)
        temperatures, top_p, min_p, top_k = numbers
        filtered = any(filters(param) for param in params)
        tokens = choose(
            allowed, temperatures, top_k.view(torch.int32), top_p, min_p, seeds, positions, filtered=filtered
        )
    else:
        tokens = greedy(allowed)
    asked = [row for row, param in enumerate(params) if param.logprobs is not None]
    if not asked:
        return Samples(tokens, ())
    rows = slice(asked[0], asked[-1] + 1)  # not those alone that asked: to pick them would copy their logits
    most = max(params[row].logprobs or 0 for row in asked)
    logprobs = log_probs(logits[rows], tokens[rows], most)
    return Samples(tokens, [param.logprobs for param in params], asked[0], logprobs)


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


def banned_token_ids(span: Span) -> frozenset[int]:
    """Ids that must not be drawn after a span: those that would end its request before ``min_tokens``."""
    request = span.request
    if span.stop - len(request.prompt_token_ids) >= request.params.min_tokens:
        return frozenset()
    return request.eos_token_ids.union(request.params.stop_token_ids or ())

"""One prompt, and what has been made of it."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Protocol

from nanovllm.outputs import Logprob, Logprobs, RequestMetrics, Scores
from nanovllm.sampling_params import SamplingParams


class Status(Enum):
    """WAITING -> RUNNING -> FINISHED; a preempted request goes back from RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TextBuilder(Protocol):
    """Turns a request's tokens into text, one by one, and watches for its stop strings."""

    def since(self, start: int) -> str:
        """Return the text from character ``start`` on, as far as no later token can change or cut it."""

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token; return the stop string that the text now holds, if ``may_stop`` and there is one."""

    def finish(self) -> None:
        """No more tokens come: give out what was held back."""


class Matcher(Protocol):
    """Holds one request to the form that its text must have. Its state depends on the accepted tokens alone."""

    def accept(self, token_id: int) -> str | None:
        """Take a drawn token; return why the request must end with it, if it must: ``"stop"`` or ``"error"``."""

    def mask(self, logits: Any, spans: Any) -> None:
        """Set to -inf, in place, what may not follow a step's spans, in the rows of all requests with a matcher."""


class Sampled(NamedTuple):
    """What the model runner found out for one request."""

    token_id: int
    """What it drew; below 0 nothing: the span draws nothing, or the model's numbers were none."""
    scores: Scores | None = None
    """What the step knows of log-probabilities, if the request asked for them: it is that of ``row``."""
    row: int = 0
    prompt: tuple[int, Scores, Sequence[int]] | None = None
    """The place of the first prompt token that the step tells something about, what it tells, and in which rows."""

    @property
    def logprobs(self) -> dict[int, Logprob] | None:
        """The drawn token first, then the best ones, if the request asked for them."""
        return None if self.scores is None else self.scores.entry(self.row)


class TokenCounts:
    """How often a request's output holds each token, kept up to date in constant time for each new one.

    ``words`` are as ``ops.penalize`` reads them, ``count << 32 | token``, each token once: no step counts anew.
    """

    def __init__(self, prompt: Iterable[int] = (), output: Iterable[int] = ()) -> None:
        self.words = array("q", dict.fromkeys(prompt))
        self._places = {token: place for place, token in enumerate(self.words)}
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        place = self._places.setdefault(token, len(self.words))
        if place == len(self.words):
            self.words.append(token)
        self.words[place] += 1 << 32


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One prompt and what has been computed of it. Only the scheduler and its block manager write here.

        token_ids   [ p p p p p p | o o o ] ?    p: prompt, o: output, ?: pending, a step under way draws it
        computed    [ # # # # # # # # # ]   .    #: in the cache, or a step under way puts it there
        block_ids   [ 7     | 2     | 9     ]    block 7 holds tokens [0, 4) at block size 4, and so on

    Invariant: 0 <= num_computed_tokens <= num_tokens, and num_computed_tokens <= len(block_ids) * block size. A step
    that brings num_computed_tokens up to num_tokens draws the next token: it is pending until the step is settled.
    """

    request_id: str
    index: int = 0
    """Which sample of its prompt: with ``n > 1`` as many requests share a ``request_id``."""
    prompt: str | None = None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """``params.max_tokens``, cut to what the context holds."""
    eos_token_ids: frozenset[int] = frozenset()
    """The model's own end ids; empty if the request ignores them."""
    seed: int = 0
    """The request's own seed, or one drawn for it."""
    arrival: int
    """Running number: the order in which requests came."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """``params.bad_words`` as tokens, in each way that they may come."""
    priority: int = 0
    cache_salt: str = ""
    """Requests share cached blocks only with requests of the same salt."""
    builder: TextBuilder | None = None
    matcher: Matcher | None = None
    """Needs every token before it says what may come next: a request that has one waits for its pending token."""
    stream: bool = False
    """Give out what is new after each step, instead of everything at the end."""

    rank: int = 0
    """Its place among the others: the smaller goes first, the earlier of two equal ones."""
    status: Status = Status.WAITING
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    """Drawn by steps that are still under way: they exist, but nobody here knows them yet."""
    block_ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Chained digest of each full block of ``token_ids``, as far as they were needed."""
    num_committed_blocks: int = 0
    """Leading blocks that the prefix index knows, or that are equal to blocks it knows."""
    chain_parent: int | str = ""
    """What the block after the committed ones continues; see ``Block.parent``."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    num_preemptions: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    """When things happened, as the engine writes it; the counts in it come with ``current_metrics``."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    adjusts: bool = field(init=False)
    """Whether its next token is drawn from other logits than the model's, for as long as it runs."""
    counts: TokenCounts | None = None
    """Of the known tokens, if penalties ask for them."""
    logprobs: Logprobs = field(default_factory=Logprobs)
    prompt_logprobs: Logprobs | None = None
    """Those of the leading prompt tokens as far as they are known, if this sample has to find them out."""
    num_sent_tokens: int = 0
    num_sent_chars: int = 0
    sent_logprob: float = 0.0
    """How much of the output a streaming request has given out, and the sum of its log-probabilities."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.chain_parent = self.cache_salt
        params = self.params
        self.adjusts = bool(
            self.matcher or self.bad_words or params.penalizes or params.allowed_token_ids or params.logit_bias
        )
        if params.penalizes:
            self.counts = self.counts_until(len(self.token_ids))

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together, the pending ones too."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next steps have to compute; none if a step under way draws the last one allowed, or the one
        that a matcher waits for."""
        total = len(self.token_ids) + self.num_pending_tokens
        if total - len(self.prompt_token_ids) >= self.max_tokens or (self.matcher and self.num_pending_tokens):
            return 0
        return total - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, as far as they are known."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be computed of it."""
        return self.status is Status.FINISHED

    def current_metrics(self) -> RequestMetrics:
        """Return what is known now of the request's times and counts, as a value of its own."""
        counts = {"num_generation_tokens": self.num_output_tokens, "num_preemptions": self.num_preemptions}
        return replace(self.metrics, **counts)

    def counts_until(self, stop: int) -> TokenCounts:
        """Return the counts of the first tokens, as many of ``stop`` as are known; in constant time if they are all."""
        if self.counts is not None and stop >= len(self.token_ids):
            return self.counts
        start = len(self.prompt_token_ids)
        # the prompt matters for repetition alone
        prompt = self.prompt_token_ids if self.params.repetition_penalty != 1.0 else ()
        return TokenCounts(prompt, self.token_ids[start:stop])

    def too_short(self, stop: int) -> bool:
        """Whether the output must not end yet, as of its first ``stop`` tokens."""
        return stop - len(self.prompt_token_ids) < self.params.min_tokens

    def ends_with(self, tokens: tuple[int, ...], stop: int) -> bool:
        """Whether the output, as of its first ``stop`` tokens, is known to end with these."""
        start = stop - len(tokens)
        return not tokens if start < len(self.prompt_token_ids) else self.token_ids[start:stop] == list(tokens)

    def banned(self, stop: int) -> frozenset[int]:
        """Return ids that must not come after the first ``stop`` tokens: those that would end the request before
        ``min_tokens``, and the last ones of bad words whose others stand at the end of the output.
        """
        banned = {word[-1] for word in self.bad_words if self.ends_with(word[:-1], stop)}
        if self.too_short(stop):
            banned |= self.eos_token_ids.union(self.params.stop_token_ids or ())
        return frozenset(banned)

    def unscored(self, start: int, stop: int) -> range:
        """Return the places of a span whose rows have still to tell the log-probability of the next prompt token."""
        if self.prompt_logprobs is None:
            return range(0)
        return range(max(start, len(self.prompt_logprobs) - 1), min(stop, len(self.prompt_token_ids) - 1))

    def score(self, start: int, scores: Scores, rows: Sequence[int]) -> None:
        """Add ``Sampled.prompt``. Nothing comes twice: a preempted prompt runs again when all its steps are settled."""
        assert self.prompt_logprobs is not None and start == len(self.prompt_logprobs), "the next one is another"
        self.prompt_logprobs.extend(scores, rows)

    def append(self, sampled: Sampled) -> None:
        """Add a drawn token and decide whether it ends the request (``finish_reason`` is then set).

        End ids come before length, as in vLLM; a stop string completed by the last token allowed counts as a
        stop. A token that ends the request by its id adds nothing to the text. A token that was not allowed is not
        added: it is what a row of -inf alone gives, when bad words have banned all that ``allowed_token_ids`` leaves.
        """
        token = sampled.token_id
        allowed = self.params.allowed_token_ids
        if allowed and (token not in allowed or token in self.banned(len(self.token_ids))):
            self.finish_reason = "error"
            return
        self.token_ids.append(token)
        if self.counts is not None:
            self.counts.add(token)
        if sampled.scores is not None:
            self.logprobs.append(sampled.scores, sampled.row)
        may_stop = self.num_output_tokens >= self.params.min_tokens
        ended = None if self.matcher is None else self.matcher.accept(token)
        if ended == "error" or token in self.eos_token_ids:
            self.finish_reason = ended or "stop"
        elif may_stop and token in (self.params.stop_token_ids or ()):
            self.finish_reason, self.stop_reason = "stop", token
        elif self.builder is not None and (found := self.builder.push(token, may_stop=may_stop)) is not None:
            self.finish_reason, self.stop_reason = "stop", found
        elif ended is not None:
            self.finish_reason = ended
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = "length"

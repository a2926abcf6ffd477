"""What comes back: one RequestOutput for each prompt, in vLLM's shape and with nano-vllm's item view."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload


@dataclass(slots=True)
class Logprob:
    """The natural logarithm of one token's probability, before temperature and filters."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


class Scores(Protocol):
    """What one step found out about its rows, in arrays: objects are made for those alone that somebody reads."""

    def entry(self, row: int) -> dict[int, Logprob]:
        """Return the drawn token and the best ones of a row, the drawn one first."""

    def own(self, row: int) -> float:
        """Return the log-probability of the drawn token of a row."""


class Unscored:
    """Scores of prompt tokens that have none: an entry is None. Implements ``Scores``."""

    def entry(self, row: int) -> Any:
        """Return None."""

    def own(self, row: int) -> float:
        """Return 0, the logarithm of certainty."""
        return 0.0


class Logprobs(Sequence[dict[int, Logprob]]):
    """One dict for each token of a request, the drawn token first: a list that is made when it is read.

    256 requests with 5 log-probabilities would be 1,800 new objects a step, and as many for the garbage collector to
    look through; most are never read. Each reading makes a new dict, so changing one changes nothing here. Equal to a
    list of the same dicts, sliced, added and pickled as one. It keeps the arrays of its steps alive, those of other
    requests' rows too (some 100 bytes a row).
    """

    __slots__ = ("_decode", "_rows", "_steps")

    def __init__(
        self, steps: Sequence[Scores] = (), rows: Sequence[int] = (), decode: Callable[[int], str] | None = None
    ) -> None:
        self._steps = list(steps)
        self._rows = list(rows)
        self._decode = decode

    def append(self, step: Scores, row: int) -> None:
        """Add what a step found out about one of its rows."""
        self.extend(step, (row,))

    def extend(self, step: Scores, rows: Sequence[int]) -> None:
        """Add what a step found out about several of its rows."""
        self._steps += [step] * len(rows)
        self._rows += rows

    def since(self, start: int, decode: Callable[[int], str] | None) -> "Logprobs":
        """Return the dicts from ``start`` on as a list of their own, whose tokens get their text from ``decode``."""
        return Logprobs(self._steps[start:], self._rows[start:], decode)

    def total(self) -> float:
        """Return the sum of the drawn tokens' log-probabilities. For those of a whole request, in its order."""
        return sum(step.own(row) for step, row in zip(self._steps, self._rows, strict=True))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, place: slice) -> "Logprobs": ...
    def __getitem__(self, place: int | slice) -> "dict[int, Logprob] | Logprobs":
        if isinstance(place, slice):
            return Logprobs(self._steps[place], self._rows[place], self._decode)
        entry = self._steps[place].entry(self._rows[place])
        if self._decode is not None:
            for token, found in (entry or {}).items():
                found.decoded_token = self._decode(token)
        return entry

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, Logprobs)):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __add__(self, other: Sequence[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*self, *other]

    def __radd__(self, other: Sequence[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[dict[int, Logprob]]], tuple[list[dict[int, Logprob]]]]:
        return list, (list(self),)


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    """Without special tokens and without the stop string, unless asked for."""
    token_ids: list[int]
    """With the end token, if one was drawn."""
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    """One dict for each token, the drawn token first; only if asked for. See ``Logprobs``."""
    finish_reason: str | None = None
    """``"stop"``, ``"length"``, ``"abort"`` or ``"error"``; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or the stop token id that ended it; None for the model's own end id."""

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request: seconds of ``time.perf_counter``, 0.0 for what has not happened (yet).

    Names are those of vLLM's ``RequestStateStats``. With ``n > 1``: of the first sample.
    """

    arrival_time: float = 0.0
    """When the request was queued, as seconds since 1970; the same moment as ``queued_ts``."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """When the first step that computes something of it was decided."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token."""
        return max(self.first_token_ts - self.queued_ts, 0.0)


ITEMS = ("prompt", "text", "token_ids", "finished")


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, as an object (vLLM) and as a read-only mapping (nano-vllm).

    ``out["text"]``, ``"text" in out``, ``dict(out)`` and iteration over the keys work; the items are
    ``prompt``, ``text``, ``token_ids`` and ``finished``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """One dict for each prompt token, that token first; None for the first one and for those before
    ``prompt_logprob_start``; only if asked for. A list that is made when it is read, the same in every output of a
    stream; shorter if the request ended before its prompt was computed."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    metrics: RequestMetrics | None = None
    """When it was queued, scheduled, and gave its first and last token."""

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first completion."""
        return self.outputs[0].token_ids

    def keys(self) -> tuple[str, ...]:
        """The items of the mapping view."""
        return ITEMS

    def __iter__(self) -> Iterator[str]:
        return iter(ITEMS)

    def __len__(self) -> int:
        return len(ITEMS)

    def __contains__(self, key: object) -> bool:
        return key in ITEMS

    def __getitem__(self, key: str) -> Any:
        if key not in ITEMS:
            raise KeyError(f"{key!r}; the items are {', '.join(ITEMS)}")
        return getattr(self, key)

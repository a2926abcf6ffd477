"""What a caller may ask of the tokens generated for one prompt."""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, NoReturn

from nanovllm.errors import RequestError, unknown_option


class RequestOutputKind(Enum):
    """What each output of a request holds, where it has several."""

    CUMULATIVE = 0
    """All that there is so far."""
    DELTA = 1
    """What is new since the one before."""
    FINAL_ONLY = 2
    """There is one, at the end."""


GREEDY_BELOW = 1e-5
"""A temperature under this means greedy decoding, as in vLLM."""

MAX_SEED = 2**63 - 1

NOT_YET: dict[str, object] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "spaces_between_special_tokens": True,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
}
"""Fields of vLLM that are known here but not built: any value but this one is refused, not ignored."""


@dataclass(slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop. vLLM's fields, in vLLM's order.

    Checked on construction and again when a request is added (the engine keeps its own copy, so changing an
    object afterwards changes no request). Every failure is a RequestError, a ValueError that carries
    ``.parameter`` and ``.value``.
    """

    n: int = 1
    """Samples of each prompt, which is computed once; needs a temperature."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id on a tie. Values in (1e-5, 0.01) count as 0.01."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability; (0, 1]."""
    top_k: int = 0
    """Keep this many of the most likely tokens (and any that tie with the last); 0 and -1 keep all."""
    min_p: float = 0.0
    seed: int | None = None
    """Makes the draws a function of this number and the token's position alone. None: drawn from the engine's."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; the earliest match wins and is cut off."""
    stop_token_ids: Sequence[int] | None = None
    """More ids, beside the model's own end ids, that end the output."""
    ignore_eos: bool = False
    """Go on past the model's end ids (not past ``stop_token_ids``)."""
    max_tokens: int | None = 64
    """Most tokens to generate; None: as many as the context holds."""
    min_tokens: int = 0
    """End ids cannot be drawn, and stop strings do not count, before this many tokens."""
    logprobs: int | None = None
    """Also return the log-probabilities of this many best tokens (before temperature) and of the drawn one."""
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    """False: return ids only, with empty text."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """For ``AsyncLLM``. ``LLM.generate`` gives FINAL_ONLY and ``LLM.stream`` DELTA, whatever is said here."""
    structured_outputs: Any = None
    """A ``StructuredOutputsParams``, or a dict of its fields: the form that the text must have."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __new__(cls, *args: object, **kwargs: object) -> "SamplingParams":
        """Refuse an unknown field with its nearest name, which a dataclass's own TypeError would not give."""
        known = cls.__dataclass_fields__
        for name in kwargs:
            if name not in known:
                raise unknown_option("SamplingParams", name, known)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, default in NOT_YET.items():
            if getattr(self, name) != default:
                _refuse(name, getattr(self, name), f"is not supported yet; leave it at {default!r}")
        _integer("n", self.n, 1, 16_384)
        self.temperature = _number("temperature", self.temperature, 0.0, 2.0)
        if GREEDY_BELOW <= self.temperature < 0.01:
            self.temperature = 0.01  # smaller ones overflow float16 logits; vLLM does the same
        if self.greedy and self.n > 1:
            _refuse("n", self.n, "must be 1 with temperature=0, where all samples would be the same")
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            _refuse("top_p", self.top_p, "must be in (0, 1]; use temperature=0 for the most likely token")
        _integer("top_k", self.top_k, -1)
        if self.seed == -1:
            self.seed = None
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        if self.logprobs is True:
            self.logprobs = 1
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0)
        if not isinstance(self.output_kind, RequestOutputKind):
            _refuse("output_kind", self.output_kind, "must be a RequestOutputKind")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "must be True or False")
        self._check_stops()

    def _check_stops(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else _sequence("stop", self.stop)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                _refuse("stop", stop, "must be a string of at least one character, or a list of such")
        if stops and not self.detokenize:
            _refuse("stop", self.stop, "needs detokenize=True, for stop strings are found in the text")
        self.stop = stops
        tokens = _sequence("stop_token_ids", self.stop_token_ids)
        for token in tokens:
            _integer("stop_token_ids", token, 0)
        self.stop_token_ids = list(dict.fromkeys(tokens))

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list, whatever form the caller gave."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW

    def clone(self) -> "SamplingParams":
        """Return a copy, checked again."""
        return replace(self)


SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


def _refuse(name: str, value: object, rule: str) -> NoReturn:
    raise RequestError(f"{name} is {value!r}; it {rule}.", parameter=name, value=value)


def _number(name: str, value: object, low: float, high: float) -> float:
    """Return ``value`` as a float in [low, high]; a bool, a string or NaN is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestError(
            f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.", parameter=name, value=value
        )
    return float(value)


def _sequence(name: str, value: object) -> list[Any]:
    """Return a list, tuple or set of things as a list, and None as an empty one."""
    if value is not None and not isinstance(value, (Sequence, Set)):
        _refuse(name, value, "must be a list")
    return list(value or ())


def _integer(name: str, value: object, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bound = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise RequestError(f"{name} is {value!r}; it must be an integer {bound}.", parameter=name, value=value)

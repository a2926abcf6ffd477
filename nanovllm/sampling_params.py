"""What a caller may ask of the tokens generated for one prompt."""

import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, NoReturn

from nanovllm.errors import RequestError, shown, unknown_option


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

PENALTIES = 1e-30, 1e30
"""What float32 can bear: 0 or infinity would make NaN of a logit."""

MOST_BIAS = 100.0
MOST_SCORED_IDS = 128
SWITCHES = (
    "ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip


@dataclass(slots=True)
class SamplingParams:
    """How to choose the next token, and when to stop. vLLM's fields, in vLLM's order.

    Checked on construction and again when a request is added (the engine keeps its own copy, so changing an
    object afterwards changes no request). Every failure is a RequestError, a ValueError that carries
    ``.parameter`` and ``.value``.
    """

    n: int = 1
    """Samples of each prompt, which is computed once; at temperature 0 all are the same."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the output holds; [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken from it as often as the output holds the token; [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides the positive logits and multiplies the others of all tokens in prompt and output (Keskar et al. 2019,
    arXiv 1909.05858); [1e-30, 1e30], more than 1 discourages."""
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id on a tie. Values in (1e-5, 0.01) count as 0.01."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability; (0, 1]."""
    top_k: int = 0
    """Keep this many of the most likely tokens (and any that tie with the last); 0 and -1 keep all."""
    min_p: float = 0.0
    """Drop the tokens whose probability is under this part of the largest one; [0, 1]."""
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
    """Also return the log-probabilities of this many best tokens and of the drawn one; -1: of all. The engine's
    ``logprobs_mode`` says before or after what."""
    prompt_logprobs: int | None = None
    """Also return, of each prompt token but the first, its log-probability after those before it, and this many best
    tokens; -1: all. From the logits as they came. Such a request finds nothing of its prompt in the prefix cache."""
    logprob_token_ids: Sequence[int] | None = None
    """Also return the log-probabilities of these ids, at most 128, without ranks."""
    prompt_logprob_start: int | None = None
    """``prompt_logprobs`` only of the tokens behind this place of the prompt, from 0; what stands before it may be
    found in the prefix cache."""
    flat_logprobs: bool = False
    """Accepted: log-probabilities are kept in flat arrays and read like a list of dicts either way."""
    detokenize: bool = True
    """False: return ids only, with empty text."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Accepted: the ``tokenizers`` library puts none of its own between them, so nothing changes."""
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """For ``AsyncLLM``. ``LLM.generate`` gives FINAL_ONLY and ``LLM.stream`` DELTA, whatever is said here."""
    structured_outputs: Any = None
    """A ``StructuredOutputsParams``, or a dict of its fields: the form that the text must have."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these ids, before penalties; cut to [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """No other token is drawn."""
    bad_words: Sequence[str] | None = None
    """Texts that may not be generated: the last token of each is banned where the others have just been drawn."""

    def __new__(cls, *args: object, **kwargs: object) -> "SamplingParams":
        """Refuse an unknown field with its nearest name, which a dataclass's own TypeError would not give."""
        known = cls.__dataclass_fields__
        for name in kwargs:
            if name not in known:
                raise unknown_option("SamplingParams", name, known)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in SAMPLING_FIELDS:  # numbers of NumPy and of tensors without a dimension count as Python's
            if getattr(value := getattr(self, name), "shape", None) == ():
                setattr(self, name, value.item())
        _integer("n", self.n, 1, 16_384)
        for name in ("presence_penalty", "frequency_penalty"):
            setattr(self, name, _number(name, getattr(self, name), -2.0, 2.0))
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, *PENALTIES)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.temperature = _number("temperature", self.temperature, 0.0, 2.0)
        if GREEDY_BELOW <= self.temperature < 0.01:
            self.temperature = 0.01  # smaller ones overflow float16 logits; vLLM does the same
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
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1)
        if self.prompt_logprob_start is not None:
            _integer("prompt_logprob_start", self.prompt_logprob_start, 0)
            if self.prompt_logprobs is None:
                _refuse("prompt_logprob_start", self.prompt_logprob_start, "needs prompt_logprobs")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "must be True or False")
        kind: object = self.output_kind
        if not isinstance(kind, RequestOutputKind):
            kinds = ", ".join(each.name for each in RequestOutputKind)
            _refuse("output_kind", kind, f"must be a RequestOutputKind: {kinds}")
        self._check_stops()
        self._check_tokens()

    def _check_stops(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else _sequence("stop", self.stop)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                _refuse("stop", stop, "must be a string of at least one character, or a list of such")
        if stops and not self.detokenize:
            _refuse("stop", self.stop, "needs detokenize=True, for stop strings are found in the text")
        self.stop = stops
        self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids)

    def _check_tokens(self) -> None:
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, _token_ids(name, getattr(self, name)))
                if not getattr(self, name):
                    _refuse(name, [], "must hold at least one id; leave it at None for no such list")
        if self.logprob_token_ids is not None and len(self.logprob_token_ids) > MOST_SCORED_IDS:
            _refuse("logprob_token_ids", self.logprob_token_ids, f"must hold at most {MOST_SCORED_IDS} ids")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                _refuse("logit_bias", self.logit_bias, "must be a dict of token ids and numbers")
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0)
                _number("logit_bias", bias, -sys.float_info.max, sys.float_info.max)
            self.logit_bias = {
                token: max(-MOST_BIAS, min(MOST_BIAS, float(bias))) for token, bias in self.logit_bias.items()
            }
        if isinstance(self.bad_words, str):
            _refuse("bad_words", self.bad_words, "must be a list of strings")
        words = _sequence("bad_words", self.bad_words)
        for word in words:
            if not isinstance(word, str) or not word.strip() or any("\ud800" <= sign <= "\udfff" for sign in word):
                _refuse("bad_words", word, "must be text, more than spaces and no lone surrogates, or a list of such")
        self.bad_words = words

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list, whatever form the caller gave."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence penalty."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def penalizes(self) -> bool:
        """Whether tokens of the request so far change the logits of the next one."""
        return self.penalties != (1.0, 0.0, 0.0)

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs``, or 0 where only those of ``logprob_token_ids`` are asked for."""
        return 0 if self.logprobs is None and self.logprob_token_ids else self.logprobs

    def clone(self) -> "SamplingParams":
        """Return a copy, checked again."""
        return replace(self)


SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))


def _refuse(name: str, value: object, rule: str) -> NoReturn:
    raise RequestError(f"{name} is {shown(value)}; it {rule}.", parameter=name, value=value)


def _number(name: str, value: object, low: float, high: float) -> float:
    """Return ``value`` as a float in [low, high]; a bool, a string or NaN is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RequestError(
            f"{name} is {shown(value)}; it must be a number from {low:g} to {high:g}.", parameter=name, value=value
        )
    return float(value)


def _sequence(name: str, value: object) -> list[Any]:
    """Return a list, tuple or set of things as a list, and None as an empty one."""
    if value is not None and not isinstance(value, (Sequence, Set)):
        _refuse(name, value, "must be a list")
    return list(value or ())


def _token_ids(name: str, value: object) -> list[int]:
    """Return ids as a list, each once."""
    tokens = _sequence(name, value)
    for token in tokens:
        _integer(name, token, 0)
    return list(dict.fromkeys(tokens))


def _integer(name: str, value: object, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bound = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise RequestError(f"{name} is {shown(value)}; it must be an integer {bound}.", parameter=name, value=value)

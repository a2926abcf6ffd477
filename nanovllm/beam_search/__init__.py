"""Beam search over the public parts: each step is one call of ``generate``, for one token of every beam.

    step   beams of one prompt                      candidates                    kept
    n      [ p p a ] -0.7   [ p p b ] -1.1    ->    2 * width of each beam   ->   the best ``width``

All blocks of a beam but the last are in the prefix cache, so a step computes few tokens of each; without the cache it
computes all of them again.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.admission import expect
from nanovllm.errors import ConfigError, RequestError, unknown_option
from nanovllm.llm import LLM
from nanovllm.outputs import Logprob
from nanovllm.prompts import Prompt, TokensPrompt, as_list
from nanovllm.sampling_params import SamplingParams


@dataclass(slots=True)
class BeamSearchParams:
    """How to search; vLLM's fields. Every failure is a RequestError."""

    beam_width: int
    """Beams kept. Twice as many log-probabilities are asked for, so ``max_logprobs`` must allow them."""
    max_tokens: int
    ignore_eos: bool = False
    """Go on past the model's end ids."""
    temperature: float = 0.0
    """As in vLLM it changes no score: log-probabilities are those before temperature."""
    length_penalty: float = 1.0
    """A beam's score is its log-probability divided by its length, prompt included, to this power."""
    include_stop_str_in_output: bool = False
    """Keep the end id in ``tokens``."""

    def __new__(cls, *args: object, **kwargs: object) -> "BeamSearchParams":
        """Refuse an unknown field with its nearest name."""
        for name in kwargs:
            if name not in cls.__dataclass_fields__:
                raise unknown_option("BeamSearchParams", name, cls.__dataclass_fields__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} is {value!r}; it must be a positive integer.", parameter=name, value=value)
        if not isinstance(self.length_penalty, (int, float)) or not math.isfinite(self.length_penalty):
            raise RequestError(
                f"length_penalty is {self.length_penalty!r}; it must be a finite number.",
                parameter="length_penalty", value=self.length_penalty,
            )  # fmt: skip


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """For each step the candidates it was chosen from."""
    text: str | None = None
    """What ``tokens`` say; None without a tokenizer."""
    finish_reason: str | None = None
    """``"stop"`` at an end id; ``"length"`` where ``max_tokens``, the context or the cache ends, also if pins leave no
    room; ``"error"`` if the model's numbers were none."""
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    """The beams of one prompt."""

    beams: list[BeamSearchSequence]
    room: int
    """Tokens that may still come."""
    done: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    params: BeamSearchParams,
    *,
    use_tqdm: bool | Callable[..., Any] = False,
) -> list[BeamSearchOutput]:
    """Find for each prompt ``beam_width`` continuations of high probability. Results come in the order of the prompts.

    All prompts are searched together. Raises RequestError as ``LLM.generate`` does, and ConfigError where
    ``logprobs_mode`` says that there are logits in the place of log-probabilities. Cost: ``max_tokens`` calls of it.
    """
    expect("params", params, BeamSearchParams, "must be BeamSearchParams")
    if not llm.config.logprobs_mode.endswith("logprobs"):
        raise ConfigError(
            f"logprobs_mode is {llm.config.logprobs_mode!r}; beam search needs log-probabilities: take 'raw_logprobs'.",
            parameter="logprobs_mode", value=llm.config.logprobs_mode,
        )  # fmt: skip
    limits, blocks = llm.llm_engine.limits, llm.llm_engine.scheduler.blocks
    most = min(limits.max_model_len, blocks.num_blocks * blocks.block_size + 1)  # the last token needs no place
    one = SamplingParams(
        max_tokens=1, logprobs=2 * params.beam_width, temperature=params.temperature, ignore_eos=True, detokenize=False
    )
    ends = frozenset() if params.ignore_eos else limits.eos_token_ids
    searches = []
    salts = []
    for prompt in as_list(prompts):
        _, tokens, salt = llm.encode(prompt)
        room = min(params.max_tokens, most - len(tokens))
        searches.append(_Search([BeamSearchSequence(list(tokens))], room))
        salts.append(salt)

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in ends)
        return beam.cum_logprob / math.pow(max(1, length), params.length_penalty)

    step = 0
    while live := [(search, salt) for search, salt in zip(searches, salts, strict=True) if search.beams]:
        asked = [
            TokensPrompt(prompt_token_ids=beam.tokens, cache_salt=salt)
            for search, salt in live
            for beam in search.beams
        ]
        answers = iter(llm.generate(asked, one, use_tqdm=use_tqdm))
        step += 1
        for search, _ in live:
            grown = []
            for beam in search.beams:
                answer = next(answers).outputs[0]
                if not answer.logprobs:
                    beam.finish_reason = answer.finish_reason
                    search.done.append(beam)
                    continue
                candidates = answer.logprobs[0]
                for token, entry in candidates.items():
                    total, logprobs = beam.cum_logprob + entry.logprob, [*beam.logprobs, candidates]
                    if token in ends:
                        kept = [*beam.tokens, token] if params.include_stop_str_in_output else beam.tokens
                        search.done.append(BeamSearchSequence(kept, total, logprobs, finish_reason="stop"))
                    else:
                        grown.append(BeamSearchSequence([*beam.tokens, token], total, logprobs))
            search.beams = heapq.nlargest(params.beam_width, grown, key=score)
            if step >= search.room:
                for beam in search.beams:
                    beam.finish_reason = "length"
                search.done, search.beams = search.done + search.beams, []
    best = [heapq.nlargest(params.beam_width, search.done, key=score) for search in searches]
    if not llm.config.skip_tokenizer_init:
        for beam in (beam for beams in best for beam in beams):
            beam.text = llm.get_tokenizer().decode(beam.tokens)
    return [BeamSearchOutput(beams) for beams in best]

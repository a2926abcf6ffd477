"""Log-probabilities of given continuations, as evaluations ask for them: one prefill each, and no token is generated.

prompt  [ p p p p p p p ]  continuations  [ a a ]  [ b b b ]  [ c ]

first   p p p p p p p a a      computes the prompt; only the rows that tell of a have logits
then    . . . . . p p b b b    finds the prompt's full blocks in the prefix cache
        . . . . . p p c
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nanovllm.block_manager import BlockManager
from nanovllm.errors import ConfigError, RequestError
from nanovllm.llm import LLM
from nanovllm.outputs import Logprobs, RequestOutput
from nanovllm.prompts import Prompt, TokensPrompt, as_list, parse
from nanovllm.sampling_params import SamplingParams

Continuation = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Score:
    """What a model thinks of a continuation of a prompt."""

    token_ids: list[int]
    """Of the continuation. A text that begins where the prompt has spaces has these in its tokens."""
    logprob: float
    """The natural logarithm of its probability after the prompt: the sum of ``token_logprobs``; NaN if the model's
    numbers were none."""
    token_logprobs: list[float]
    is_greedy: bool
    """Whether none of its tokens had a more likely one: greedy decoding gives it, ties aside."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One continuation."""

    tokens: list[int]
    """The prompt's too."""
    start: int
    """How many of them are the prompt's."""
    salt: str


def score(
    llm: LLM,
    prompts: Prompt | Sequence[Prompt],
    continuations: Any,
    *,
    use_tqdm: bool | Callable[..., Any] = False,
) -> list[Any]:
    """Return a ``Score`` for each prompt, in their order; a list of them where it has a list of continuations.

    A continuation is a text or a list of token ids. For a single prompt give one or a list of them; for a list of
    prompts a list with as many entries, each one or a list. Texts are cut as lm-eval does: prompt and continuation are
    encoded in one piece and cut behind as many tokens as the prompt has alone, and spaces at the end of the prompt
    belong to the continuation. Token ids follow each other as they are.

    Raises RequestError, with nothing computed, for lists of unequal lengths, for prompts and continuations without a
    token, and for what is longer than ``max_model_len - 1`` tokens together, and later where pins leave no room;
    ConfigError for texts without a tokenizer,
    and where ``logprobs_mode`` says that there are logits in the place of log-probabilities; EngineError as
    ``LLM.generate`` does. Cost: one prefill for each continuation; with a prefix cache each prompt is computed once,
    but for its last block.
    """
    if not llm.config.logprobs_mode.endswith("logprobs"):
        raise ConfigError(
            f"logprobs_mode is {llm.config.logprobs_mode!r}; score needs log-probabilities: take 'raw_logprobs'.",
            parameter="logprobs_mode", value=llm.config.logprobs_mode,
        )  # fmt: skip
    listed = as_list(prompts)
    given = [continuations] if isinstance(prompts, Mapping) or _is_one(prompts) else continuations
    if not _is_list(given) or len(given) != len(listed):
        _refuse(given, f"must have one entry for each of {len(listed)} prompts: a continuation, or a list of such")
    groups = [[entry] if _is_one(entry) else entry for entry in given]
    if wrong := [each for group in groups for each in (group if _is_list(group) else [group]) if not _is_text(each)]:
        _refuse(wrong[0], "must be a text or a list of token ids")
    pairs = [(parse(prompt), each) for prompt, group in zip(listed, groups, strict=True) for each in group]
    jobs = list(_jobs(llm, pairs))
    params = [
        SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprob_start=job.start - 1, detokenize=False
        )
        for job in jobs
    ]
    for job, one in zip(jobs, params, strict=True):
        llm.llm_engine.check(job.tokens, one, 0, job.salt)

    found: dict[int, Score] = {}
    for places in _rounds(jobs, llm.llm_engine.scheduler.blocks):
        asked = [TokensPrompt(prompt_token_ids=jobs[place].tokens, cache_salt=jobs[place].salt) for place in places]
        outputs = llm.generate(asked, [params[place] for place in places], use_tqdm=use_tqdm)
        for place, output in zip(places, outputs, strict=True):
            found[place] = _score(jobs[place], output)
    scores = iter([found[place] for place in range(len(jobs))])
    return [
        next(scores) if _is_one(entry) else [next(scores) for _ in group]
        for entry, group in zip(given, groups, strict=True)
    ]


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def _is_text(given: Any) -> bool:
    """Whether it is a text or a list of ids, maybe an empty one."""
    return isinstance(given, str) or (_is_list(given) and all(isinstance(token, int) for token in given))


def _is_one(given: Any) -> bool:
    """Whether it is one prompt or continuation and not many; ``[]`` is none."""
    return isinstance(given, str) or (_is_list(given) and bool(given) and isinstance(given[0], int))


def _jobs(llm: LLM, pairs: Sequence[tuple[tuple[str | None, Sequence[int] | None, str], Any]]) -> Iterator[_Job]:
    """Join each prompt with its continuation, and refuse what cannot be scored. Each text is encoded once."""
    texts: dict[str, None] = {}
    for (text, tokens, _), each in pairs:
        if tokens is None and text is not None:
            texts |= dict.fromkeys((text.rstrip(), text + each) if isinstance(each, str) else (text,))
    encoded = dict(zip(texts, llm.get_tokenizer().encode_batch(list(texts)) if texts else (), strict=True))
    most = llm.llm_engine.limits.max_model_len - 1
    for (text, tokens, salt), each in pairs:
        if tokens is None and text is not None and isinstance(each, str):
            start, whole = len(encoded[text.rstrip()]), encoded[text + each]
        else:
            first = encoded[text] if tokens is None and text is not None else list(tokens or ())
            more = llm.get_tokenizer().encode(each, add_special_tokens=False) if isinstance(each, str) else each
            start, whole = len(first), [*first, *more]
        if not start:
            _refuse(text if tokens is None else tokens, "has no tokens; give at least one, such as BOS", "prompts")
        if len(whole) <= start:
            _refuse(each, "must have at least one token of its own behind the prompt")
        if len(whole) > most:
            _refuse(f"{len(whole)} tokens long with its prompt", f"must be at most {most} tokens long with it, below "
                    "max_model_len; shorten one of them, or raise max_model_len")  # fmt: skip
        yield _Job(whole, start, salt)


def _rounds(jobs: Sequence[_Job], blocks: BlockManager) -> Iterator[list[int]]:
    """Yield places of jobs in rounds: what shares its prompt with another of a round comes one later, and finds it.

    As many prompts at a time as half of the cache holds, so that they are still there.
    """
    first: list[int] = []
    second: list[int] = []
    prompts: set[tuple[str, tuple[int, ...]]] = set()
    held = 0
    for place, job in enumerate(jobs):
        size = (job.start - 1) // blocks.block_size
        prompt = (job.salt, tuple(job.tokens[: size * blocks.block_size]))
        if prompt in prompts and size and blocks.enable_prefix_caching:
            second.append(place)
            continue
        if second and held + size > blocks.num_blocks // 2:
            yield first
            yield second
            first, second, prompts, held = [], [], set(), 0
        first.append(place)
        prompts.add(prompt)
        held += size
    yield from (places for places in (first, second) if places)


def _score(job: _Job, output: RequestOutput) -> Score:
    tokens, logprobs = job.tokens[job.start :], output.prompt_logprobs
    assert isinstance(logprobs, Logprobs), "they were asked for"
    if output.outputs[0].finish_reason == "error":
        return Score(tokens, math.nan, [math.nan] * len(tokens), is_greedy=False)
    # one entry in each dict, and without a text, which costs more than all the rest
    entries = [entry for (entry,) in (found.values() for found in logprobs.since(job.start, None))]
    if len(entries) < len(tokens):
        _refuse(tokens, "could not be computed: pins leave no room for it and its prompt. Unpin some")
    values = [entry.logprob for entry in entries]
    total = sum(values)
    return Score(tokens, total, values, all(entry.rank == 1 for entry in entries) and not math.isnan(total))


def _refuse(value: object, rule: str, parameter: str = "continuations") -> NoReturn:
    raise RequestError(f"{parameter} is {value!r}; it {rule}.", parameter=parameter, value=value)

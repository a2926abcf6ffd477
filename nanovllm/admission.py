"""What a request may ask for: the one place for all limits that an engine sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from nanovllm.block_manager import BlockManager
from nanovllm.errors import RequestError, shown
from nanovllm.sampling_params import SamplingParams

Encode = Callable[[str], list[int]] | None
"""What gives the tokens of a text, without special ones, if there is a tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a request may ask for; every limit is checked in ``check`` and nowhere else."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int = -1
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end ids."""
    seed: int = 0
    by_priority: bool = True
    """Whether requests go by priority; else none may have one, for it would be ignored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Able:
    """What an engine has the means for."""

    text: bool
    """Whether tokens become text."""
    grammars: bool
    """Whether there is what holds a request to its ``structured_outputs``."""
    encode: Encode


def check(
    tokens: Sequence[int], params: SamplingParams, priority: object, cache_salt: object, *,
    limits: Limits, blocks: BlockManager, able: Able,
) -> None:  # fmt: skip
    """Raise RequestError if such a request can never be served; ``SamplingParams`` checks what holds for any engine.

    Nothing is allocated for a request before. Cost: a look at each token of the prompt, none if it is too long.
    """
    if not tokens:
        refuse("prompt", "", "has no tokens; give at least one, such as the BOS token")
    if len(tokens) >= limits.max_model_len:
        refuse("prompt", f"{len(tokens)} tokens long", "must leave room for one token of output in "
               f"max_model_len={limits.max_model_len}; shorten it, or raise max_model_len")  # fmt: skip
    if blocks.blocks_for(len(tokens)) > blocks.num_blocks:
        refuse("prompt", f"{len(tokens)} tokens long", f"must fit the cache of {blocks.num_blocks} blocks of "
               f"{blocks.block_size} tokens; shorten it, or give the cache more memory")  # fmt: skip
    usual = set(map(type, tokens)) == {int} and 0 <= min(tokens) <= max(tokens) < limits.vocab_size
    for token in () if usual else tokens:  # a look at each takes ten times as long
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limits.vocab_size:
            refuse("prompt_token_ids", token, f"must hold integers from 0 to {limits.vocab_size - 1}")
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= limits.vocab_size:
                refuse(name, token, f"must hold integers from 0 to {limits.vocab_size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name) or 0
        wanted = limits.vocab_size if asked == -1 else asked
        if wanted > limits.vocab_size:
            refuse(name, asked, f"must not exceed the vocabulary of {limits.vocab_size}; -1: all")
        if 0 <= limits.max_logprobs < wanted:
            refuse(name, asked, f"must not exceed max_logprobs={limits.max_logprobs}")
    if (start := params.prompt_logprob_start or 0) >= len(tokens):
        refuse("prompt_logprob_start", start, f"must be below the prompt's {len(tokens)} tokens")
    if params.bad_words and able.encode is None:
        refuse("bad_words", params.bad_words, "needs a tokenizer, and this engine has none (skip_tokenizer_init)")
    _check_something_is_left(params, limits, encode_bad_words(params, able.encode))
    if params.stop_strings and not able.text:
        refuse("stop", params.stop, "needs a tokenizer, and this engine has none (skip_tokenizer_init)")
    if params.structured_outputs is not None and not able.grammars:
        refuse("structured_outputs", params.structured_outputs, "needs a tokenizer, and this engine has none")
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        refuse("priority", priority, "must be an integer of 64 bits with a sign; smaller goes first")
    if priority and not limits.by_priority:
        refuse("priority", priority, 'needs scheduling_policy="priority"; make the LLM with it, or leave this at 0')
    if not isinstance(cache_salt, str):
        refuse("cache_salt", cache_salt, "must be a string; the empty one shares with everybody")


def _check_something_is_left(params: SamplingParams, limits: Limits, bad_words: Sequence[tuple[int, ...]]) -> None:
    banned = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        banned.update(params.stop_token_ids or (), () if params.ignore_eos else limits.eos_token_ids)
    if len(banned) >= limits.vocab_size:
        refuse("stop_token_ids", params.stop_token_ids, "must leave a token to draw, with bad_words and min_tokens")
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        refuse("allowed_token_ids", params.allowed_token_ids, "must hold more than bad_words, and than end ids if "
               "there is a min_tokens")  # fmt: skip


def encode_bad_words(params: SamplingParams, encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Return bad words as tokens: as they begin a text, and as they follow a space; vLLM bans both too."""
    if encode is None or not params.bad_words:
        return ()
    texts = (space + word.lstrip() for word in params.bad_words for space in ("", " "))
    return tuple({tokens: None for text in texts if (tokens := tuple(encode(text)))})


def expect(name: str, value: object, kind: type, rule: str) -> None:
    """Raise RequestError if a value is of another type."""
    if not isinstance(value, kind):
        refuse(name, value, rule)


def refuse(name: str, value: object, rule: str) -> NoReturn:
    """Raise RequestError for a value, with the rule it breaks."""
    raise RequestError(f"{name} is {shown(value)}; it {rule}.", parameter=name, value=value)

"""The forms in which a caller may give prompts, and how one is told from many."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from nanovllm.errors import RequestError, shown


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str
    """Share cached prefixes only with requests of the same salt."""


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; ``prompt`` is then only carried along."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "lora_request": (None,), "tokenization_kwargs": (None, {}), "mm_processor_kwargs": (None, {}),
    "chat_template_content_format": ("auto",),
}  # fmt: skip
"""Arguments of vLLM's calls: any value but these, which ask for nothing, is refused, not ignored."""


def as_list(prompts: Any) -> list[Any]:
    """One prompt or many? A str, a dict, or a non-empty list of ints is one, as in vLLM; ``[]`` is none."""
    if isinstance(prompts, (str, bytes, Mapping)) or not hasattr(prompts, "__iter__"):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def where(place: int, number: int) -> str:
    """Begin a message about one prompt of many."""
    return f"prompt {place} of {number}: " if number > 1 else ""


def parse(prompt: Any, about: str = "") -> tuple[str | None, Sequence[int] | None, str]:
    """Return (text, token ids, cache salt) of one prompt; text or ids may be None, not both.

    Raises RequestError, which begins with ``about``, for anything that is no prompt.
    What the ids hold is checked by the engine.
    """
    if isinstance(prompt, str):
        return prompt, None, ""
    if isinstance(prompt, Mapping) and not set(prompt) - set(TokensPrompt.__annotations__):
        text, tokens, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        well_typed = isinstance(text, (str, type(None))) and isinstance(salt, (str, type(None)))
        if well_typed and _is_ids(tokens) and (text, tokens) != (None, None):
            return text, tokens, salt or ""
    elif not isinstance(prompt, Mapping) and prompt is not None and _is_ids(prompt):
        return None, prompt, ""
    raise RequestError(
        f"{about}a prompt is {shown(prompt)}; it must be a str, a list of token ids (an array's .tolist()), or a dict "
        "with 'prompt' or 'prompt_token_ids', perhaps a 'cache_salt' of text, and no other keys.",
        parameter="prompts", value=prompt,
    )  # fmt: skip


def one_each(name: str, given: Any, number: int, kind: type) -> list[Any]:
    """Repeat a single value for every prompt, or check that a list has one for each."""
    if isinstance(given, kind):
        return [given] * number
    if not isinstance(given, Sequence) or not all(isinstance(value, kind) for value in given):
        raise RequestError(
            f"{name} is {given!r}; it must be of type {kind.__name__}, or a list of such.", parameter=name, value=given
        )
    if len(given) != number:
        raise RequestError(
            f"{name} has {len(given)} entries for {number} prompts; give one for each, or a single one for all.",
            parameter=name, value=len(given),
        )  # fmt: skip
    return list(given)


def _is_ids(value: object) -> bool:
    return value is None or (isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)))


def built_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's further arguments without vLLM's that are not built. Raises RequestError if one asks for any."""
    for name, values in NOT_BUILT.items():
        if given.get(name, values[0]) not in values:
            rule = f"is not supported; leave it out, or at {values[0]!r}"
            raise RequestError(f"{name} is {shown(given[name])}; it {rule}.", parameter=name, value=given[name])
    return {name: value for name, value in given.items() if name not in NOT_BUILT}

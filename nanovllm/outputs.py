"""What comes back: one RequestOutput for each prompt, in vLLM's shape and with nano-vllm's item view."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """The natural logarithm of one token's probability, before temperature and filters.

    Not frozen, as the others are: a frozen one takes four times as long to make, and a step may make thousands.
    """

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    """Without special tokens and without the stop string, unless asked for."""
    token_ids: list[int]
    """With the end token, if one was drawn."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict for each token, the drawn token first; only if asked for."""
    finish_reason: str | None = None
    """``"stop"``, ``"length"``, ``"abort"`` or ``"error"``; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or the stop token id that ended it; None for the model's own end id."""

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


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
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

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

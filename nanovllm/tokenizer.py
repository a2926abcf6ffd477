"""Text to token ids and back: incremental detokenisation, stop strings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from tokenizers import Tokenizer as Backend

from nanovllm.config import ModelConfig, token_ids
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``."""

TEMPLATES = "nanovllm.templates"
"""The room that renders conversations."""

INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no character yet."""

MAX_PENDING = 64
"""After so many tokens that decode to nothing readable, they are given out as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerParts:
    """What a checkpoint knows about its tokenizer."""

    backend: Backend
    """Encodes and decodes. Its post-processor adds the BOS token where the model wants one, so that
    ``encode(text, add_special_tokens=True)`` is right for plain text."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that the tokenizer names as end of text; config and generation config may name more."""
    chat_template: str | None = None
    """Jinja source, or None for a base model."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """``bos_token``, ``eos_token``, ... as text: the names a chat template may use."""


class Tokenizer:
    """A model's tokenizer with its chat template. Thread-safe: it keeps no state between calls."""

    def __init__(self, parts: TokenizerParts, *, chat_template: str | None = None) -> None:
        self.backend = parts.backend
        self.eos_token_ids = parts.eos_token_ids
        self.special_tokens = dict(parts.special_tokens)
        self.chat_template = chat_template or parts.chat_template

    @property
    def vocab_size(self) -> int:
        """Tokens with a text, added ones included; a model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """The id that the tokenizer names as end of text, as transformers calls it; None if it names none."""
        return next(iter(self.eos_token_ids), None)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of one token, written as the vocabulary has it (``<|eot_id|>``); None if it has no such one."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the BOS token where the model wants one."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                f"prompt {text[:40]!r} cannot be encoded: {error}. It must be text without lone surrogates.",
                parameter="prompt", value=text,
            ) from error  # fmt: skip

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts, on all cores."""
        try:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts))]
        except (UnicodeEncodeError, TypeError):
            return [self.encode(text) for text in texts]  # names the one at fault

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; bytes that are no character become U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> str:
        """Render a conversation as the model was trained to read it; see ``nanovllm.templates.render``."""
        text: str = import_module(TEMPLATES).render(self, messages, **options)
        return text


class Detokenizer:
    """One request's tokens to text, token by token, in constant time each, looking out for stop strings.

    Tokens are decoded together with a few before them, for some decoders join or strip at the start; text is
    taken once its last bytes form a whole character.

        token_ids   [ . . . . | c c c | n n ]      c: context, decoded again; n: not given out yet
        text        [ given out       | held ]     held: could still become a stop string
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip = params.skip_special_tokens
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._hold = max(map(len, self._stops), default=1) - 1
        self._window: list[int] = []
        self._known = 0  # tokens at the head of the window whose text has been taken
        self._context = ""  # what these tokens decode to
        self._parts: list[str] = []
        self._length = 0
        self._tail = ""  # the last self._hold characters
        self._finished = False

    def since(self, start: int) -> str:
        """Return the text from character ``start`` on, as far as no later token can change or cut it."""
        stop = self._length if self._finished else max(start, self._length - self._hold)
        parts: list[str] = []
        first = self._length
        for part in reversed(self._parts):
            if first <= start:
                break
            parts.append(part)
            first -= len(part)
        return "".join(reversed(parts))[start - first : stop - first]

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token; return the stop string found, if any. The text then ends at it."""
        self._window.append(token_id)
        new = self._take(final=False)
        found = self._find_stop(new) if may_stop and self._stops and new else None
        if self._hold:
            self._tail = (self._tail + new)[-self._hold :]
        return found

    def finish(self) -> None:
        """Give out what was held back, an incomplete character included."""
        if not self._finished:
            self._take(final=True)
            self._finished = True

    def _take(self, *, final: bool) -> str:
        """Move what can be read now from the window to the text, and return it."""
        new = self._decode(self._window)[len(self._context) :]
        long = len(self._window) - self._known >= MAX_PENDING
        ready = new if final else new.rstrip(INCOMPLETE) or (new if long else "")
        if ready:
            self._append(ready)
            self._context += ready
        if new and ready == new:
            self._window = self._window[self._known :]  # the tokens of this piece are the context of the next
            self._known = len(self._window)
            self._context = self._decode(self._window)
        elif not ready and (final or long):
            del self._window[self._known :]  # they have no text
        elif long:  # each ends within a character, of which none has more than four bytes: the last few are enough
            self._window, self._known = self._window[-8:], 0
            self._context = self._decode(self._window).rstrip(INCOMPLETE)
        return ready

    def _append(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""

    def _find_stop(self, new: str) -> str | None:
        """Cut the text at the stop string that is complete first, as if the text came character by character.

        So the result does not depend on how the text was cut into tokens. Of several that end at one place the
        longest counts. Only the newest text, and as much before it as a stop string reaches back, is searched.
        """
        text = self._tail + new
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            place = text.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if place >= 0 and (found is None or (place + len(stop), -len(stop)) < found[:2]):
                found = (place + len(stop), -len(stop), stop)
        if found is None:
            return None
        end, negative, stop = found
        surplus = len(text) - (end if self._include_stop else end + negative)
        whole = "".join(self._parts)
        self._parts, self._length = [], 0
        self._append(whole[: len(whole) - surplus])
        self._window, self._known, self._context, self._finished = [], 0, "", True
        return stop


def text_tools(tokenizer: Tokenizer) -> dict[str, Callable[..., Any]]:
    """Return what an ``LLMEngine`` needs to know of texts."""
    return {
        "make_builder": lambda params: Detokenizer(tokenizer, params),
        "decode_token": lambda token: tokenizer.decode([token], skip_special_tokens=False),
        "encode": lambda text: tokenizer.encode(text, add_special_tokens=False),
    }


def end_ids(model: ModelConfig, generation: dict[str, Any], tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that tokenizer, config or generation config call the end."""
    named = {*model.eos_token_ids, *token_ids(generation.get("eos_token_id"))}
    named |= set(() if tokenizer is None else tokenizer.eos_token_ids)
    return frozenset(token for token in named if token < model.vocab_size)

"""What a request asks for, made into a grammar over the model's tokens: checked before the request is admitted."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np

from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured.matcher import GrammarMatcher, Masks
from nanovllm.structured.params import StructuredOutputsParams, refuse
from nanovllm.tokenizer import Tokenizer

MOST_GRAMMARS = 64
"""How many grammars are kept for the next request that asks for the same."""

COMPILE_SECONDS = 5.0
"""Longest that a compilation may take. llguidance's own limits hold for lexer and parser, not for all of a schema."""

MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that a grammar depends on, beside the tokenizer."""

    form: str
    source: str
    whitespace: bool
    whitespace_pattern: str | None


class Compiler:
    """Makes matchers. One for each engine; keeps the grammars that were used last.

    ``eos_token_ids``: the engine's end ids, allowed wherever a text may end. Raises RequestError if llguidance is not
    installed. Takes as long as llguidance's view of the tokenizer: 0.3 s for 49,152 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        try:
            import llguidance
        except ImportError as missing:
            raise RequestError(
                f"structured_outputs needs the package llguidance ({missing}). Install it: "
                "pip install 'nanovllm[structured]'.",
                parameter="structured_outputs",
            ) from missing
        self._llguidance = llguidance
        self._grammars: OrderedDict[Options, Any] = OrderedDict()
        self._compiling: Thread | None = None
        written, size = tokenizer.backend.to_str(), max(tokenizer.backend.get_vocab().values()) + 1
        ends = sorted(token for token in eos_token_ids if token < size)
        if not ends:  # there has to be one: a token of no model, which is never allowed
            content = json.loads(written)
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            content["added_tokens"].append({"id": size, "content": f"<|no end {size}|>", "special": True, **flags})
            written = json.dumps(content)
        self._tokens = llguidance.LLTokenizer(written, eos_token=ends or [size])
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._masks = Masks(llguidance.LLExecutor(), self._tokens.vocab_size)
        self._ends, self._has_end = frozenset(ends or [size]), bool(ends)

    def matcher(self, params: SamplingParams) -> GrammarMatcher:
        """Return a new matcher for a request. Raises RequestError for what llguidance refuses, with its message."""
        wanted = params.structured_outputs
        if isinstance(wanted, Mapping):
            wanted = StructuredOutputsParams(**wanted)
        if not isinstance(wanted, StructuredOutputsParams):
            refuse("structured_outputs", wanted, "must be a StructuredOutputsParams, or a dict of its fields")
        form, source = wanted.form, wanted.source()
        options = Options(form, source, not wanted.disable_any_whitespace, wanted.whitespace_pattern)
        grammar = self._grammars.get(options)
        if grammar is None:
            grammar = self._compile(options)
            self._grammars[options] = grammar
            if len(self._grammars) > MOST_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(options)
        never = frozenset() if self._has_end and not params.ignore_eos else self._ends
        return GrammarMatcher(grammar.deep_copy(), self._masks, never)

    def _compile(self, options: Options) -> Any:
        """Return llguidance's matcher before its first token, with its first mask already computed once."""
        if self._compiling is not None:  # one that was given up; a second at a time is not begun
            self._compiling.join(COMPILE_SECONDS)
        made: list[Any] = []
        if self._compiling is None or not self._compiling.is_alive():
            # llguidance works without the interpreter's lock; what takes too long is left to end by itself
            self._compiling = Thread(target=lambda: made.append(self._try(options)), daemon=True)
            self._compiling.start()
            self._compiling.join(COMPILE_SECONDS)
        if not made:
            refuse(options.form, options.source, f"must compile within {COMPILE_SECONDS:g} s; make it simpler")
        self._compiling = None
        matcher = made[0]
        if isinstance(matcher, str):
            refuse(options.form, options.source, f"is refused by llguidance: {matcher[:MESSAGE_CHARS].strip()}")
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if not set(np.unpackbits(words, bitorder="little").nonzero()[0].tolist()) - self._ends:
            refuse(options.form, options.source, "must allow some text that is not empty")
        return matcher

    def _try(self, options: Options) -> Any:
        """Return the matcher, or llguidance's words against it."""
        make = self._llguidance.LLMatcher
        try:
            matcher = make(self._tokens, self._text(options), log_level=0, limits=self._limits)
            matcher.compute_bitmask()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the answer to this request
            return str(error)
        return matcher.get_error() or matcher

    def _text(self, options: Options) -> str:
        """Return the grammar in llguidance's own form."""
        make, form, source = self._llguidance.LLMatcher, options.form, options.source
        if form in ("json", "json_object"):
            schema = source if form == "json" else '{"type": "object"}'
            spaces: Any = {"whitespace_flexible": options.whitespace}
            if options.whitespace_pattern is not None:
                spaces = {"whitespace_pattern": options.whitespace_pattern}
            return str(make.grammar_from_json_schema(schema, overrides=spaces))
        if form == "regex":
            return str(make.grammar_from_regex(source))
        if form == "choice":
            return str(make.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(source)))))
        return str(self._llguidance.grammar_from("grammar", source))

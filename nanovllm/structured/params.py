"""What a request may ask of the form of its text, in vLLM's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nanovllm.errors import RequestError, unknown_option

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Exactly one of these is given."""

MAX_CHARS = 262_144
"""Longest schema, regular expression, grammar or list, as text."""

MAX_NESTING = 64
"""Deepest JSON schema, as in vLLM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """The form that a text must have: exactly one of the first five fields.

    Every failure is a RequestError, a ValueError that carries ``.parameter`` and ``.value``. Whether llguidance can
    serve a schema or a grammar is found out when the request is added.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    regex: str | None = None
    """A regular expression in the syntax of Rust's ``regex``, for the whole text."""
    choice: Sequence[str] | None = None
    """The texts to choose from."""
    grammar: str | None = None
    """A context-free grammar in Lark's form, or in llama.cpp's GBNF; the text is its ``start`` (``root``)."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its parts."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the parts of JSON."""
    structural_tag: Any = None

    def __new__(cls, *args: object, **kwargs: object) -> "StructuredOutputsParams":
        """Refuse an unknown field with its nearest name, which a dataclass's own TypeError would not give."""
        known = cls.__dataclass_fields__
        for name in kwargs:
            if name not in known:
                raise unknown_option("StructuredOutputsParams", name, known)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "nothing"
            raise RequestError(
                f"structured_outputs asks for {found}; it must have exactly one of {', '.join(FORMS[:-1])}.",
                parameter="structured_outputs", value=self,
            )  # fmt: skip
        if self.structural_tag is not None:
            refuse("structural_tag", self.structural_tag, "is not supported; say the same as a grammar")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                refuse(name, getattr(self, name), "must be text")
        if self.json_object not in (None, True):
            refuse("json_object", self.json_object, "must be True, or be left away")
        if not isinstance(self.disable_any_whitespace, bool):
            refuse("disable_any_whitespace", self.disable_any_whitespace, "must be True or False")
        if self.choice is not None:
            self._check_choice()
        if len(self.source()) > MAX_CHARS:
            refuse(self.form, f"{len(self.source())} characters long", f"must not exceed {MAX_CHARS} characters")

    def _check_choice(self) -> None:
        choice = self.choice
        if not isinstance(choice, (list, tuple)) or not all(isinstance(text, str) and text for text in choice):
            refuse("choice", choice, "must be a list of texts of at least one character")
        if not choice:
            refuse("choice", choice, "must hold at least one text")

    @property
    def form(self) -> str:
        """Which of the fields is given."""
        return next(name for name in FORMS if getattr(self, name) is not None)

    def source(self) -> str:
        """Return the schema, the expression, the grammar or the list as text, the same for what means the same."""
        form = self.form
        if form == "json":
            return _schema(self.json)
        value = getattr(self, form)
        return value if isinstance(value, str) else json.dumps(value)


def _schema(schema: object) -> str:
    """Return a JSON schema as text; it must be an object that is not nested too deeply."""
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(
            f"json is {_short(schema)}, and no JSON ({error}); it must be a JSON schema, as text or as a dict.",
            parameter="json", value=schema,
        ) from error  # fmt: skip
    if not isinstance(schema, dict):
        refuse("json", schema, "must be a JSON schema: an object")
    depth = 0
    layer: list[Any] = [schema]
    while layer:
        depth += 1
        if depth > MAX_NESTING:
            refuse("json", schema, f"must not be nested deeper than {MAX_NESTING}")
        parts = [part for each in layer for part in (each.values() if isinstance(each, dict) else each)]
        layer = [part for part in parts if isinstance(part, dict | list)]
    return text


def refuse(name: str, value: object, rule: str) -> NoReturn:
    """Raise the RequestError for a field."""
    raise RequestError(f"{name} is {_short(value)}; it {rule}.", parameter=name, value=value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

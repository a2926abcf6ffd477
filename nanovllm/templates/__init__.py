"""Conversations to text, through a model's chat template: Jinja source that came with the model, so it is not trusted.

It runs in Jinja's immutable sandbox, which lets it call and change nothing of ours; what the sandbox leaves open is
bounded here. Each turn of a loop and each call counts as one turn, and no value may grow without end:

    turns    500,000 in a rendering, and 5 seconds        nested loops, macros that call themselves
    size     10,000,000 characters or entries             "x" * 10**9, s ~ s again and again, "%9999999d", center(10**9)
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from nanovllm.errors import RequestError, shown
from nanovllm.tokenizer import Message, Tokenizer

MAX_TURNS = 500_000
MAX_SECONDS = 5.0
MAX_SIZE = 10_000_000
MAX_SOURCE = 1_000_000
"""Characters of a template; the longest known have 30,000."""
TOKENIZING = ("tokenize", "return_tensors", "return_dict")
"""Options of transformers' method of the same name."""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    **variables: Any,
) -> str:
    """Render a conversation as the model was trained to read it; the text holds its special tokens.

    ``variables`` are the template's own, such as ``enable_thinking``. transformers' options that ask for tokens are
    refused: ``Tokenizer.encode`` makes them. ``continue_final_message`` ends the text with the
    last message, so that the answer goes on from it; it excludes ``add_generation_prompt``.

    Raises RequestError for malformed messages, a model without a template, what the template refuses, and a template
    that goes beyond the bounds above.
    """
    source = chat_template or tokenizer.chat_template
    if source is None:
        raise RequestError(
            "this model has no chat template, so it was not trained to chat; use generate(), or give one with "
            "chat_template=...",
            parameter="chat_template",
        )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message=True excludes add_generation_prompt=True; set the latter to False.",
            parameter="continue_final_message", value=True,
        )  # fmt: skip
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f"messages is {messages!r}; a conversation is a list of at least one message.",
            parameter="messages", value=messages,
        )  # fmt: skip
    messages = [_checked(message) for message in messages]
    _check_tools(tools, source)
    given = {
        "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt,
        **tokenizer.special_tokens,
    }  # fmt: skip
    for name in TOKENIZING:
        if variables.pop(name, None):
            raise RequestError(
                f"{name} is set, and what comes back is text; it must be left away. encode(text, "
                "add_special_tokens=False) makes tokens of it.",
                parameter=name,
            )
    if taken := sorted(set(given) & set(variables)):
        raise RequestError(
            f"chat_template_kwargs has {taken[0]!r}, which is set by the call itself; give the template other names.",
            parameter="chat_template_kwargs", value=taken[0],
        )  # fmt: skip
    text = run(source, given | variables)
    if continue_final_message:
        final = messages[-1]["content"].strip()
        end = text.rfind(final)
        if end < 0 or not final:
            raise RequestError(
                "continue_final_message=True, but the template does not render the final message as it is.",
                parameter="continue_final_message", value=True,
            )  # fmt: skip
        text = text[: end + len(final)]
    return text


def run(source: str, variables: Mapping[str, Any]) -> str:
    """Render a template within the bounds. Raises RequestError."""
    if isinstance(source, str) and len(source) > MAX_SOURCE:
        raise RequestError(
            f"the chat template has {len(source)} characters; it may have {MAX_SOURCE}.", parameter="chat_template"
        )
    if not isinstance(source, str) or "{" not in source:
        raise RequestError(
            f"chat_template is {shown(source)}; it must be Jinja source, which says in braces where the messages go. "
            "If a file holds it, read that first.",
            parameter="chat_template", value=source,
        )  # fmt: skip
    bounds = Bounds()
    try:
        return "".join(Environment(bounds).from_string(source).generate(**variables))
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
            MemoryError) as error:  # fmt: skip
        raise RequestError(f"the chat template refuses this conversation: {error}", parameter="messages") from error


class Bounds:
    """What one rendering has used."""

    def __init__(self) -> None:
        self._turns = self._written = 0
        self._until = time.monotonic() + MAX_SECONDS

    def turn(self) -> None:
        """Count a turn of a loop, or a call."""
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise TemplateError(f"it has made {MAX_TURNS} turns and calls, and has not come to an end")
        if time.monotonic() > self._until:
            raise TemplateError(f"it has run for {MAX_SECONDS:g} seconds, and has not come to an end")

    def size(self, size: float) -> None:
        """Refuse a size before the thing is made."""
        if size > MAX_SIZE:
            raise TemplateError(f"it makes a value of {size:.0f} characters or entries; {MAX_SIZE} are allowed")

    def sized(self, value: Any) -> Any:
        """Return a value that is not too large."""
        if isinstance(value, (str, bytes, list, tuple, dict)):
            self.size(len(value))
        elif isinstance(value, int):
            self.size(value.bit_length())
        return value

    def written(self, value: Any) -> Any:
        """Return what is about to be written, and count its characters, wherever they go."""
        self.write(len(value) if isinstance(value, str) else 1)
        return value

    def write(self, size: int) -> None:
        """Count characters that are written."""
        self._written += size
        self.size(self._written)

    def before(self, function: str, *args: Any) -> None:
        """Refuse what is going to make something large out of small arguments."""
        self.turn()
        numbers = [abs(arg) for arg in args if isinstance(arg, (int, float))]
        self.size(max(numbers, default=0))
        if function == "replace" and len(args) >= 3 and all(isinstance(arg, str) for arg in args[:3]):
            self.size(len(args[0]) + args[0].count(args[1]) * len(args[2]))
        elif function == "join" and len(args) >= 2:
            first, second = args[0], args[1]  # of the method the text, of the filter the list comes first
            self.size(max(1, len(str(first))) * max(1, len(str(second))))
        elif function in {"format", "format_map", "%"} and isinstance(args[0], str):
            inner = [each for arg in args[1:] if isinstance(arg, (tuple, list)) for each in arg]
            widths = [abs(each) for each in [*numbers, *inner] if isinstance(each, int)]
            stars = args[0].count("*") + args[0].count("{")
            self.size(sum(map(int, re.findall(r"\d{1,20}", args[0]))) + stars * max(widths, default=0))


class Environment(ImmutableSandboxedEnvironment):
    """What Hugging Face's templates expect, within bounds."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False)
        self._bounds = bounds
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {"_loop": self._loop, "_sized": bounds.sized, "_written": bounds.written}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what the sandbox allows; a method's object counts as an argument."""
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        __self._bounds.before(getattr(__obj, "__name__", ""), owner, *args, *kwargs.values())
        return __self._bounds.sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what is not too large."""
        self._bounds.turn()
        many = [value for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
        if operator == "*" and many:
            self._bounds.size(len(many[0]) * max(0, right if many[0] is left else left))
        elif operator == "**":
            self._bounds.size(max(abs(left), 1) and abs(right) * max(1, int(abs(left)).bit_length()))
        elif operator == "%" and isinstance(left, str):
            self._bounds.before("%", left, right)
        return self._bounds.sized(super().call_binop(context, operator, left, right))

    def _loop(self, items: Iterable[Any], written: int) -> Iterator[Any]:
        for item in items:
            self._bounds.turn()
            self._bounds.write(written)
            yield item

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            shown = args[1:] if hasattr(function, "jinja_pass_arg") else args
            self._bounds.before(name, *shown, *kwargs.values())
            return self._bounds.sized(function(*args, **kwargs))

        return bounded


class _Bounded(NodeTransformer):
    """Lets loops count their turns, and what is put together or written its size."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        data = sum(len(text.data) for part in node.body for text in part.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_loop", nodes.Const(data))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _filter(nodes.Concat([self.visit(part) for part in node.nodes], lineno=node.lineno), "_sized")

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _filter(part, "_written") for part in node.nodes
        ]
        return node


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _checked(message: Message) -> dict[str, Any]:
    """Return a message with its content as text; a list of text parts is joined."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f'a message is {message!r}; it must be a dict like {{"role": "user", "content": "..."}}.',
            parameter="messages", value=message,
        )  # fmt: skip
    content = message.get("content")
    if "content" not in message and "tool_calls" not in message:
        raise RequestError(
            f"a message has no 'content', but {', '.join(map(repr, message))}; it must be a dict like "
            '{"role": "user", "content": "..."}.',
            parameter="messages", value=message,
        )  # fmt: skip
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise RequestError("content holds a part without text; only text is supported.", parameter="messages")
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"content is {content!r}; it must be text.", parameter="messages", value=content)
    return {**message, "content": content or ""}


def _check_tools(tools: object, source: object) -> None:
    """Refuse tools that are none, or that the model would never hear of."""
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError(
            f"tools is {shown(tools)}; it must be a list of dicts, each of which describes one.",
            parameter="tools", value=tools,
        )  # fmt: skip
    if tools and isinstance(source, str) and "tools" not in source:
        raise RequestError(
            f"tools has {len(tools)} entries, and this model's chat template shows no tools, so it would not hear of "
            "them. Leave them away, describe them in a message, or give a template that does with chat_template=...",
            parameter="tools", value=tools,
        )  # fmt: skip


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)

"""What a request may ask for, what is refused and how, and what a grammar costs the second time."""

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from nanovllm import RequestError, SamplingParams, StructuredOutputsParams, UnknownOptionError
from nanovllm.structured import compiler as module
from nanovllm.structured.compiler import Compiler
from nanovllm.structured.params import MAX_CHARS, MAX_NESTING
from nanovllm.tokenizer import Tokenizer, TokenizerParts

WORDS = ["ab", "cd", '{"', '":', "tr", "true", "}}", "é", "日"]
END = 256 + len(WORDS)


def tokenizer() -> Tokenizer:
    """Each byte is a token, and a few words are, which only a model would choose: there are no merges."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = sorted(pre_tokenizers.ByteLevel.alphabet()) + [split.pre_tokenize_str(word)[0][0] for word in WORDS]
    backend = Backend(models.BPE(vocab={symbol: place for place, symbol in enumerate(spelled)}, merges=[]))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(TokenizerParts(backend=backend, eos_token_ids=(END,)))


TOKENIZER = tokenizer()


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENIZER, frozenset({END}))


def make(compiler: Compiler, **form):
    return compiler.matcher(SamplingParams(structured_outputs=StructuredOutputsParams(**form)))


def allowed(matcher) -> list[int]:
    bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
    return bits.nonzero()[0].tolist()


def accepts(matcher, text: str) -> bool:
    """Whether the whole text may be said, byte by byte, and may end there."""
    tokens = TOKENIZER.encode(text)
    for place, token in enumerate(tokens, 1):
        if token not in allowed(matcher):
            return False
        if (ended := matcher.accept(token)) is not None:
            return ended == "stop" and place == len(tokens)
    return END in allowed(matcher)


# --- what is asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parameter", "message"),
    [
        ({}, "structured_outputs", "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "regex, choice.*exactly one"),
        ({"json_object": False}, "json_object", "must be True"),
        ({"json_object": "yes"}, "json_object", "must be True"),
        ({"structural_tag": "x"}, "structural_tag", "not supported"),
        ({"regex": 5}, "regex", "must be text"),
        ({"grammar": ["a"]}, "grammar", "must be text"),
        ({"json_object": True, "whitespace_pattern": 1}, "whitespace_pattern", "must be text"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace", "True or False"),
        ({"choice": []}, "choice", "at least one"),
        ({"choice": "ab"}, "choice", "list of texts"),
        ({"choice": ["a", 1]}, "choice", "list of texts"),
        ({"choice": ["a", ""]}, "choice", "at least one character"),
        ({"json": "{"}, "json", "no JSON"),
        ({"json": "[]"}, "json", "an object"),
        ({"json": "true"}, "json", "an object"),
        ({"json": {"a": object()}}, "json", "no JSON"),
        ({"json": "[" * 100_000}, "json", "no JSON"),
        ({"regex": "a" * (MAX_CHARS + 1)}, "regex", f"exceed {MAX_CHARS}"),
        ({"choice": ["a" * 999] * 300}, "choice", f"exceed {MAX_CHARS}"),
    ],
)
def test_a_mistake_is_named(given, parameter, message) -> None:
    with pytest.raises(RequestError, match=f"(?s){message}") as error:
        StructuredOutputsParams(**given)
    assert error.value.parameter == parameter and len(str(error.value)) < 1000
    assert parameter == "structured_outputs" or error.value.value is not None


def test_an_unknown_field_is_named_with_its_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="Did you mean 'regex'"):
        StructuredOutputsParams(regexp="a")
    with pytest.raises(UnknownOptionError, match="'backtrack'"):
        StructuredOutputsParams(regex="a", backtrack=1)


def nested(depth: int, key: str = "not") -> dict:
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {key: schema}
    return schema


@pytest.mark.parametrize("wrap", [nested, lambda depth: json.dumps(nested(depth)), lambda depth: nested(depth, "a")])
def test_schemas_may_be_nested_so_deep_and_no_deeper(wrap) -> None:
    StructuredOutputsParams(json=wrap(MAX_NESTING))
    with pytest.raises(RequestError, match=f"deeper than {MAX_NESTING}"):
        StructuredOutputsParams(json=wrap(MAX_NESTING + 1))
    circle: dict = {}
    circle["properties"] = circle
    with pytest.raises(RequestError):
        StructuredOutputsParams(json=circle)


def test_a_dict_of_the_fields_will_do_and_nothing_else(compiler) -> None:
    assert accepts(compiler.matcher(SamplingParams(structured_outputs={"regex": "ab"})), "ab")
    with pytest.raises(UnknownOptionError):
        compiler.matcher(SamplingParams(structured_outputs={"regexp": "ab"}))
    with pytest.raises(RequestError, match="must be a StructuredOutputsParams"):
        compiler.matcher(SamplingParams(structured_outputs="ab"))


# --- what it comes to -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (dict(regex="[a-c]{2}é|日+"), ["abé", "日", "日日日"], ["ab", "é", "abéé", ""]),
        (dict(choice=["a", "ab", 'q"\\', "日\n", "<|end|>", "😀"]), ["a", "ab", 'q"\\', "日\n", "😀"], ["b", "日", ""]),
        (dict(grammar='start: "x" start | "y"'), ["y", "xxy"], ["x", "yy", ""]),
        (dict(grammar='root ::= "x" root | "y"'), ["y", "xxy"], ["x", "yy", ""]),
        (dict(json_object=True), ["{}", '{"a": [1, {"b": null}]}', '{ "é" : "日" }'], ["[]", '"a"', "{", ""]),
        (dict(json_object=True, disable_any_whitespace=True), ['{"a":1}'], ['{"a": 1}', "{ }"]),
        (dict(json_object=True, whitespace_pattern="_?"), ['{"a":_1_}'], ['{"a": 1}', '{"a":__1}']),
        (dict(json={"type": "integer", "minimum": 7, "maximum": 12}), ["7", "12"], ["6", "13", "7.0", '"7"', ""]),
        (dict(json={"enum": [1, "a", None]}), ["1", '"a"', "null"], ["a", "2", ""]),
        (
            dict(json={"$defs": {"t": {"properties": {"t": {"$ref": "#/$defs/t"}}, "type": "object",
                                       "additionalProperties": False}}, "$ref": "#/$defs/t"}),
            ["{}", '{"t": {"t": {}}}'], ['{"u": {}}', '{"t": 1}'],
        ),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_what_may_be_said(compiler, form, good, bad) -> None:
    assert [text for text in good if not accepts(make(compiler, **form), text)] == []
    assert [text for text in bad if accepts(make(compiler, **form), text)] == []


def test_tokens_of_several_characters_are_allowed_where_they_fit(compiler) -> None:
    first = allowed(make(compiler, regex="abcd|true"))
    assert {TOKENIZER.decode([token]) for token in first} == {"a", "ab", "t", "tr", "true"}


def test_the_end_is_allowed_only_where_the_text_may_end(compiler) -> None:
    matcher = make(compiler, regex="aa?b?")
    assert END not in allowed(matcher)
    assert matcher.accept(TOKENIZER.encode("a")[0]) is None and END in allowed(matcher)
    assert matcher.accept(END) == "stop"


def test_what_is_not_allowed_is_an_error_and_stays_one(compiler) -> None:
    matcher = make(compiler, regex="aa")
    assert matcher.accept(END) == "error" and matcher.accept(TOKENIZER.encode("a")[0]) == "error"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (dict(regex="("), "unclosed group"),
        (dict(regex="a(?=b)"), "look-around"),
        (dict(grammar="start: nowhere"), "nowhere"),
        (dict(grammar=""), ""),
        (dict(json={"type": "objekt"}), "objekt"),
        (dict(json={"type": "string", "format": "nonsense"}), "nonsense"),
        (dict(json={"$ref": "#/$defs/none"}), ""),
        (dict(json={"$ref": "http://example.com/schema"}), ""),
        (dict(json={"$ref": "#"}), ""),
        (dict(json={"allOf": [{"type": "string"}, {"type": "integer"}]}), ""),
        (dict(regex=""), "not empty"),
        (dict(grammar='start: ""'), "not empty"),
    ],
)
def test_what_llguidance_refuses_is_refused_in_its_words(compiler, form, message) -> None:
    (name,) = form
    for _ in range(2):  # a refusal is not kept as a grammar
        with pytest.raises(RequestError, match=f"(?s){message}") as error:
            make(compiler, **form)
        assert error.value.parameter == name and len(str(error.value)) < 1200


def test_grammars_are_kept_by_content_and_the_oldest_goes_first(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_GRAMMARS", 3)
    compiler, compiled = Compiler(TOKENIZER, frozenset({END})), []
    compile_one = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda options: compiled.append(options.source) or compile_one(options))
    for regex in ("a", "b", "c", "a", "d", "a", "b"):
        assert accepts(make(compiler, regex=regex), regex), "matchers of one grammar share nothing"
    assert compiled == ["a", "b", "c", "d", "b"] and len(compiler._grammars) == 3
    for form in ({"json": {"type": "null"}}, {"json": '{"type":  "null"}'}):
        make(compiler, **form)
    make(compiler, regex='{"type": "null"}'[1:-1])
    assert len(compiled) == 7, "the same schema is the same, and text of another form is another"


SLOW = {"type": "integer"}


def test_a_compilation_that_takes_too_long_is_given_up(monkeypatch) -> None:
    compiler = Compiler(TOKENIZER, frozenset({END}))
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    hold = threading.Event()
    plain = compiler._try
    monkeypatch.setattr(compiler, "_try", lambda options: (hold.wait(), plain(options))[1])
    for _ in range(2):  # the second is not even begun
        with pytest.raises(RequestError, match=r"within 0\.05 s") as error:
            make(compiler, json=SLOW)
        assert error.value.parameter == "json"
    assert sum(thread is compiler._compiling for thread in threading.enumerate()) == 1
    hold.set()
    compiler._compiling.join()
    monkeypatch.setattr(module, "COMPILE_SECONDS", 60.0)
    assert accepts(make(compiler, regex="ab"), "ab")


def test_without_llguidance_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"nanovllm\[structured\]") as error:
        Compiler(TOKENIZER, frozenset({END}))
    assert error.value.parameter == "structured_outputs"


def test_nothing_is_loaded_before_it_is_needed() -> None:
    code = "import sys, nanovllm.llm; assert not {'llguidance', 'nanovllm.structured'} & set(sys.modules)\n"
    code += "from nanovllm import StructuredOutputsParams; assert 'llguidance' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys; from nanovllm import StructuredOutputsParams; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- whatever comes ---------------------------------------------------------------------------------------------

NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False, width=32)
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=5)
KEYWORDS = st.sampled_from([
    "type", "properties", "items", "required", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs",
    "pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "multipleOf",
    "additionalProperties", "prefixItems", "patternProperties", "x-guidance",
])  # fmt: skip
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
HOSTILE = st.recursive(
    VALUES | TYPES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)
SENSIBLE = st.recursive(
    st.builds(lambda kind: {"type": kind}, TYPES)
    | st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1)),
    lambda inner: st.builds(lambda item: {"type": "array", "items": item, "maxItems": 3}, inner)
    | st.builds(
        lambda parts: {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False},
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    )
    | st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)  # fmt: skip
REGEXES = st.text(alphabet="ab(|)[]{}*+?.^$\\dwsé-,019", max_size=25)
GRAMMARS = st.text(alphabet='start:root= "ab"|()*+?~/\n{}1,#%', max_size=40).map("start: ".__add__)
MANY = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def walk(matcher, dice, steps: int = 30) -> None:
    """Say what is allowed, at random: it is never refused afterwards, and there is always something."""
    for _ in range(steps):
        tokens = allowed(matcher)
        assert tokens and all(token <= END for token in tokens)
        ended = matcher.accept(dice.choice(tokens))
        assert ended != "error"
        if ended is not None:
            return


@MANY
@given(
    form=st.builds(lambda x: {"json": x}, st.dictionaries(KEYWORDS, HOSTILE, max_size=4))
    | st.builds(lambda x: {"regex": x}, REGEXES)
    | st.builds(lambda x: {"grammar": x}, GRAMMARS),
    dice=st.randoms(use_true_random=False),
)
def test_whatever_is_asked_is_served_or_refused(compiler, form, dice) -> None:
    try:
        matcher = make(compiler, **form)
    except RequestError as error:
        assert error.parameter in form
        return
    walk(matcher, dice)


@MANY
@given(schema=SENSIBLE, dice=st.randoms(use_true_random=False))
def test_a_sensible_schema_is_served_and_what_ends_is_json(compiler, schema, dice) -> None:
    try:
        matcher = make(compiler, json=schema, disable_any_whitespace=True)
    except RequestError as error:
        assert "llguidance" in str(error)
        return
    said: list[int] = []
    for _ in range(300):
        tokens = allowed(matcher)
        closing = [token for token in tokens if TOKENIZER.decode([token]) in set('"]}')]
        said.append(dice.choice(closing or tokens))
        ended = matcher.accept(said[-1])
        assert ended != "error"
        if ended is not None:
            json.loads(TOKENIZER.decode(said))
            return

"""Chat templates: what they are given, what a caller may ask, and that a hostile one can neither hang nor escape."""

import time

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from nanovllm import templates
from nanovllm.errors import RequestError
from nanovllm.tokenizer import Tokenizer, TokenizerParts

CHATML = (
    "{%- if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [{"role": "user", "content": "hi"}]


def tokenizer(template=CHATML, **special):
    backend = Backend(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>"))
    return Tokenizer(TokenizerParts(backend=backend, chat_template=template, special_tokens=special))


def render(template=CHATML, messages=TALK, **options):
    return tokenizer(template, bos_token="<s>").apply_chat_template(messages, **options)


def test_a_conversation():
    assert render() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert render(tools=[{"name": "é"}]).startswith('TOOLS [{"name": "é"}]\n')
    assert render("{{ bos_token }}{{ x }}", x=5) == "<s>5"
    assert render(chat_template="{{ messages[0].role }}") == "user"


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    assert "abc" in render(messages=[{"role": "user", "content": parts}])
    assert "user\n<|im_end|>" in render(messages=[{"role": "user", "content": None}])


def test_the_final_message_is_continued():
    talk = [*TALK, {"role": "assistant", "content": " the answer is "}]
    text = render(messages=talk, continue_final_message=True, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n the answer is"
    for options in (dict(add_generation_prompt=True), {}):
        with pytest.raises(RequestError, match="excludes add_generation_prompt"):
            render(messages=talk, continue_final_message=True, **options)
    for template, final in (("{{ messages[-1].content | upper }}", "x"), (CHATML, " ")):
        with pytest.raises(RequestError, match="does not render the final message"):
            render(
                template, [{"role": "assistant", "content": final}],
                continue_final_message=True, add_generation_prompt=False,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ([], "at least one message"), ("hi", "a conversation is a list"),
        ({"role": "user"}, "a conversation is a list"),
        (5, "a conversation is a list"), (["hi"], "must be a dict"), ([{"content": "hi"}], "must be a dict"),
        ([{"role": 5, "content": "hi"}], "must be a dict"), ([{"role": "user", "content": 5}], "must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text is supported"),
        ([{"role": "user", "contents": "hi"}], "has no 'content'"), ([{"role": "user"}], "has no 'content'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_conversation(messages, rule):
    with pytest.raises(RequestError, match=rule) as caught:
        render(messages=messages)
    assert caught.value.parameter == "messages"


def test_a_message_that_calls_tools_needs_no_content():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert render("{{ messages[0].tool_calls[0].function.name }}{{ messages[0].content }}", [call]) == "f"


def test_tools_are_a_list_that_the_template_shows():
    with pytest.raises(RequestError, match="this model's chat template shows no tools.*chat_template=") as caught:
        render("{{ messages[0].content }}", tools=[{"name": "f"}])
    assert caught.value.parameter == "tools"
    assert render("{{ messages[0].content }}", tools=[]) == render("{{ messages[0].content }}", tools=None) == "hi"
    for wrong in (3, "f", {"name": "f"}, ["f"]):
        with pytest.raises(RequestError, match="tools is .*must be a list of dicts") as caught:
            render(tools=wrong)
        assert caught.value.parameter == "tools" and caught.value.value == wrong


def test_a_model_without_a_template():
    with pytest.raises(RequestError, match="no chat template.*not trained to chat") as caught:
        render(None)
    assert caught.value.parameter == "chat_template"


@pytest.mark.parametrize("source", [5, "template.jinja", "no braces"])
def test_what_is_no_template(source):
    with pytest.raises(RequestError, match="must be Jinja source.*read that first") as caught:
        render(chat_template=source)
    assert caught.value.parameter == "chat_template" and caught.value.value == source


def test_options_of_transformers_that_ask_for_tokens():
    assert render(tokenize=False) == render()
    for name, value in (("tokenize", True), ("return_tensors", "pt"), ("return_dict", True)):
        with pytest.raises(RequestError, match=f"{name} is set, and what comes back is text.*encode") as caught:
            render(**{name: value})
        assert caught.value.parameter == name


def test_variables_do_not_replace_what_the_call_sets():
    for name in ("messages", "bos_token"):
        with pytest.raises((RequestError, TypeError)):
            tokenizer(bos_token="<s>").apply_chat_template(TALK, **{name: "x"})


# --- hostile ones -----------------------------------------------------------------------------------------------

BIG = "{% set s = 'x' * 1000000 %}"
HANGS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loops that write much": f"{{% for a in range(99999) %}}{'x' * 1000}{{% endfor %}}",
    "loops over text": BIG + "{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "filtered loops": BIG + "{% for a in s if a == 'y' %}{% else %}{% for b in s if false %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "endless calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a product of text": "{{ 'x' * 300000000 }}",
    "a product the other way": "{{ 300000000 * 'x' }}",
    "a product of lists": "{{ ([1] * 30000000) | length }}",
    "a power": "{{ 10 ** 100000000 }}",
    "a power of powers": "{{ (9 ** 9) ** (9 ** 9) }}",
    "a large range": "{{ range(10 ** 9) | list }}",
    "doubling": "{% set s = 'xxxxxxxxxx' %}" + "{% set s = s ~ s %}" * 60,
    "doubling by a sum": "{% set s = 'xxxxxxxxxx' %}" + "{% set s = s + s %}" * 60,
    "doubling by a block": "{% set s = 'xxxxxxxxxx' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "doubling by replace": "{% set s = 'xxxxxxxxxx' %}" + "{% set s = s | replace('x', 'xx') %}" * 60,
    "replace": BIG + "{{ s.replace('x', s) }}",
    "the filter replace": BIG + "{{ s | replace('x', s) }}",
    "join": BIG + "{{ s.join(s) }}",
    "the filter join": BIG + "{{ s | join(s) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "indent": "{{ 'x\nx' | indent(1000000000) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "many widths": "{{ ('%9999999d' * 100) % ((1,) * 100) }}",
    "a width given": "{{ '%*d' % (1000000000, 1) }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format with a width given": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "a long source": "x" * 2_000_000,
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{% set l = [1, 2, 3] %}" + "{% set l = l + l %}" * 60,
}


@pytest.mark.parametrize("template", HANGS.values(), ids=HANGS)
def test_a_template_cannot_hang_or_fill_the_memory(template):
    started = time.process_time()
    with pytest.raises(RequestError, match="chat template") as caught:
        render(template)
    assert time.process_time() - started < 2 * templates.MAX_SECONDS
    assert len(str(caught.value)) < 500


def test_a_template_that_is_slow_is_stopped_by_the_clock(monkeypatch):
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.05)
    with pytest.raises(RequestError, match="has run for 0.05 seconds"):
        render("{% for a in range(99999) %}{{ messages | tojson | length }}{% endfor %}")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ self._TemplateReference__context.environment.loader }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ('' | attr('__class__')).x }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{{ raise_exception('no') }}",
    "{{ nothing() }}",
    "{{ 1 / 0 }}",
    "{% broken",
    "{{ messages | _nothing }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_escape_and_its_faults_are_ours(template):
    with pytest.raises(RequestError, match="refuses this conversation"):
        render(template)


@pytest.mark.parametrize("template", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format('') }}"])
def test_what_is_hidden_is_shown_as_nothing(template):
    assert render(template) == ""


def test_what_real_templates_do_is_allowed():
    """Namespaces, macros, loop controls, slices, tests, loop variables, and a long conversation."""
    template = """
{%- set ns = namespace(found=false, last='') -%}
{%- macro say(m) -%}[{{ m.role | upper }}] {{ m.content | trim }}{%- endmacro -%}
{%- for m in messages[::-1] -%}
{%- if m.content is string and not m.content.startswith('skip') -%}{%- set ns.last = m.content -%}{%- break -%}
{%- endif -%}{%- endfor -%}
{%- for m in messages if m.role != 'tool' -%}
{{ say(m) }}{{ ', ' if not loop.last }}{{ loop.index0 }}/{{ loop.length }}
{%- endfor -%}
|{{ ns.last }}|{{ '%s-%05d' % ('a', 7) }}|{{ '{:>4}'.format(3) }}|{{ ['a', 'b'] | join(', ') }}|
{{- {'b': 1} | tojson(indent=2) }}|{{ strftime_now('%Y') | length }}|
{{- messages | map(attribute='role') | first }}|{{ messages | length }}"""
    talk = [
        {"role": "user", "content": "a"},
        {"role": "tool", "content": "t"},
        {"role": "assistant", "content": "skip"},
    ]
    text = render(template, talk)
    assert text.startswith("[USER] a, 0/2[ASSISTANT] skip1/2|t|a-00007|   3|a, b|") and text.endswith(
        '{\n  "b": 1\n}|4|user|3'
    )
    long = [{"role": "user", "content": "word " * 200} for _ in range(1024)]
    assert len(render(messages=long)) > 1_000_000

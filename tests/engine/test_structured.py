"""Structured output, end to end: whatever a random model would say, the text has the form that was asked for."""

import json
import re

import numpy as np
import pytest
import torch

from nanovllm import LLM, LLMEngine, RequestError, SamplingParams, StructuredOutputsParams
from nanovllm.request import Request, Sampled
from nanovllm.sampler import sample
from nanovllm.scheduler import Span
from nanovllm.structured.compiler import Compiler

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é日😀", 'q"\\']}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SUM = 'start: num ("+" num)~1..3\nnum: /[1-9][0-9]{0,2}/\n'
CHOICES = ["yes", "no", "yesterday", "日本😀", 'a "b" \\c', "line\nbreak"]


def ask(seed: int = 0, tokens: int = 100, **changes) -> SamplingParams:
    form = {
        name: changes.pop(name) for name in ("json", "regex", "choice", "grammar", "json_object") if name in changes
    }
    spaces = {"disable_any_whitespace": True} if {"json", "json_object"} & set(form) else {}
    wanted = StructuredOutputsParams(**form, **spaces) if form else None
    return SamplingParams(
        **{**dict(temperature=0.9, seed=seed, max_tokens=tokens, structured_outputs=wanted), **changes}
    )


def run(llm: LLM, prompts, params, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def is_person(text: str) -> bool:
    found = json.loads(text)
    assert list(found) == ["name", "age", "tags"] and len(found["name"]) <= 6 and 0 <= found["age"] <= 120
    assert len(found["tags"]) <= 2 and set(found["tags"]) <= {"a", "é日😀", 'q"\\'}
    return True


FORMS = [
    (dict(json=PERSON), is_person),
    (dict(json=json.dumps(PERSON)), is_person),
    (dict(regex=r"[A-Z][a-zé]{1,5} [0-9]{2}(\.[0-9])?"), re.compile(r"[A-Z][a-zé]{1,5} [0-9]{2}(\.[0-9])?").fullmatch),
    (dict(regex="(日本|😀){2,4}"), re.compile("(日本|😀){2,4}").fullmatch),
    (dict(choice=CHOICES), CHOICES.__contains__),
    (dict(grammar=SUM), re.compile(r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2}){1,3}").fullmatch),
    (dict(grammar='root ::= "x" [a-c]+ "!"'), re.compile("x[a-c]+!").fullmatch),
]
"""What is asked for, and what says whether a text is that."""


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_every_text_has_the_form_that_was_asked_for(open_llm, tiny, temperature) -> None:
    llm = open_llm()
    params = [ask(seed, temperature=temperature, **form) for form, _ in FORMS for seed in range(4)]
    outputs = run(llm, [[seed, 7, 9] for seed in range(len(params))], params)
    ended = 0
    for output, (form, fits) in zip(outputs, [each for each in FORMS for _ in range(4)], strict=True):
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            ended += 1
            assert fits(completion.text), (form, completion.text)
        else:
            assert completion.finish_reason == "length" and len(completion.token_ids) == 100
        assert completion.stop_reason is None
    assert ended >= 0.8 * len(params), "most should have ended by themselves"


def test_any_json_object(open_llm) -> None:
    """A random model seldom closes its braces: what it has said is the beginning of an object."""
    llm = open_llm()
    outputs = run(llm, [[seed] for seed in range(8)], [ask(seed, 200, json_object=True) for seed in range(8)])
    assert all(output.text.startswith("{") for output in outputs)
    assert all(json.loads(o.text) is not None for o in outputs if o.outputs[0].finish_reason == "stop")
    closed = run(llm, [5, 6], ask(json_object=True, stop="}", include_stop_str_in_output=True, max_tokens=2))
    assert all(len(output.token_ids) == 2 for output in closed)


def test_max_tokens_cuts_and_the_cut_text_is_a_beginning(open_llm) -> None:
    llm = open_llm()
    (output,) = run(llm, [1, 2], ask(regex="abcdefgh", max_tokens=3))
    assert (output.text, output.outputs[0].finish_reason, len(output.token_ids)) == ("abc", "length", 3)
    (output,) = run(llm, [1, 2], ask(regex="日本", max_tokens=3))
    assert (output.text, output.outputs[0].finish_reason) == ("日", "length")


def test_a_complete_text_ends_at_once_and_an_open_one_where_the_model_ends_it(open_llm, tiny) -> None:
    llm = open_llm()
    (output,) = run(llm, [1, 2], ask(regex="abc"))
    assert output.token_ids == list(output.token_ids[:3]) and output.outputs[0].finish_reason == "stop"
    assert tiny.end not in output.token_ids
    ends = [run(llm, [seed], ask(seed, regex="[ab]*", max_tokens=400))[0] for seed in range(6)]
    assert all(output.token_ids[-1] == tiny.end and re.fullmatch("[ab]*", output.text) for output in ends)
    assert len({len(output.token_ids) for output in ends}) > 1
    (output,) = run(llm, [3], ask(regex="[ab]*", ignore_eos=True, max_tokens=60))
    assert re.fullmatch("[ab]{60}", output.text) and output.outputs[0].finish_reason == "length"
    (output,) = run(llm, [3], ask(regex="[ab]{0,9}", ignore_eos=True))
    assert re.fullmatch("[ab]{9}", output.text) and output.outputs[0].finish_reason == "stop"


def test_min_tokens_holds_as_far_as_the_grammar_lets_it(open_llm, tiny) -> None:
    llm = open_llm()
    for seed in range(4):
        (output,) = run(llm, [seed], ask(seed, regex="[ab]*", min_tokens=30, max_tokens=200))
        assert len(output.token_ids) > 30
    (output,) = run(llm, [1], ask(regex="abc", min_tokens=30))
    assert (output.text, output.outputs[0].finish_reason) == ("abc", "stop")
    comma = llm.get_tokenizer().encode(",")
    (output,) = run(llm, [1], ask(regex="[ab],c", min_tokens=30, stop_token_ids=comma))
    assert (output.text[1:], output.outputs[0].finish_reason) == (",c", "stop"), "the grammar asks for what is banned"


def test_stop_strings_and_stop_ids_end_before_the_grammar_does(open_llm) -> None:
    llm = open_llm()
    (output,) = run(llm, [1], ask(regex="abcdef", stop="cd"))
    assert (output.text, output.outputs[0].stop_reason) == ("ab", "cd")
    (token,) = llm.get_tokenizer().encode("c")
    (output,) = run(llm, [1], ask(regex="abcdef", stop_token_ids=[token]))
    assert output.outputs[0].stop_reason == token and len(output.token_ids) == 3


def test_log_probabilities_are_those_of_the_unmasked_logits(open_llm) -> None:
    llm = open_llm(max_logprobs=-1)
    (masked,) = run(llm, [1, 2, 3], ask(regex="zz", logprobs=3))
    (free,) = run(llm, [1, 2, 3], ask(tokens=1, logprobs=258, temperature=0.0))
    first, own = masked.outputs[0].logprobs[0], masked.token_ids[0]
    for token, entry in first.items():
        assert entry.logprob == pytest.approx(free.outputs[0].logprobs[0][token].logprob, abs=1e-5)
        assert entry.rank == free.outputs[0].logprobs[0][token].rank
    assert first[own].rank > 1 and len(first) == 4, "the grammar was meant to forbid the likeliest"


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Two of each form, greedy and drawn, between requests that are free."""
    params = [ask(seed, 40, **form, logprobs=2, temperature=seed * 0.8) for form, _ in FORMS for seed in range(2)]
    for place in (0, 4, 9, len(params)):
        params.insert(place, ask(place, 40, logprobs=2, temperature=0.8 if place % 2 else 0.0))
    return [[place, 3, 5] * (1 + 5 * (place % 3)) for place in range(len(params))], params


def facts(outputs):
    return [
        (o.token_ids, o.text, o.outputs[0].finish_reason, [list(entry) for entry in o.outputs[0].logprobs])
        for o in outputs
    ]


def test_company_preemption_chunks_and_the_cache_change_nothing(open_llm) -> None:
    prompts, params = mixed()
    llm = open_llm()
    alone = [run(llm, prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert facts(run(llm, prompts, params)) == facts(alone)
    assert facts(run(llm, prompts[::-1], params[::-1]))[::-1] == facts(alone)
    crowded = open_llm(num_gpu_blocks_override=12, max_num_batched_tokens=9)
    assert facts(run(crowded, prompts, params)) == facts(alone)
    assert crowded.llm_engine.scheduler.num_preemptions > 0
    streamed = {str(place): "" for place in range(len(prompts))}
    for piece in llm.stream(prompts, params):
        streamed[piece.request_id] += piece.text
    assert list(streamed.values()) == [output.text for output in alone]


class LateRunner:
    """The real runner, as a GPU looks from outside: a step's tokens are known one step after its submission."""

    lookahead = 1

    def __init__(self, runner):
        self.runner = runner

    def submit(self, output):
        sampled = self.runner.submit(output)()
        drawing = [span for span in output.spans if span.samples]
        tokens = [each.token_id for each in sampled if each is not None]
        if tokens:
            self.runner._drawn.keep(drawing, torch.tensor(tokens))
        return lambda: sampled


def test_a_step_ahead_changes_nothing_either(open_llm, monkeypatch) -> None:
    prompts, params = mixed()
    llm = open_llm()
    expected = facts(run(llm, prompts, params))
    late = LateRunner(llm.llm_engine._runner)
    steps = []

    def submit(output):
        steps.append({span.request.matcher is not None for span in output.spans if span.samples})
        return LateRunner.submit(late, output)

    monkeypatch.setattr(late, "submit", submit, raising=False)
    monkeypatch.setattr(llm.llm_engine, "_runner", late)
    # the CPU's batch takes ids as they are; look up those that stand for rows, as the GPU's does
    from nanovllm import batch
    from nanovllm.ops.take_tokens import take_tokens

    plain = batch.Batch
    monkeypatch.setattr(
        batch, "Batch",
        lambda ids, *rest: plain(take_tokens(ids, late.runner._drawn.tokens), *rest),
    )  # fmt: skip
    assert facts(run(llm, prompts, params)) == expected
    assert {True, False} in steps and {False} in steps, "free requests were meant to go on meanwhile"


def test_a_request_can_be_rebuilt_from_its_tokens(open_llm) -> None:
    llm = open_llm()
    params = ask(grammar=SUM)
    (output,) = run(llm, [1, 2], params)
    engine: LLMEngine = llm.llm_engine
    one, other = (engine._make_matcher(params) for _ in range(2))
    for token in output.token_ids[:-1]:
        assert one.accept(token) is None
    for token in output.token_ids[:-1]:
        assert other.accept(token) is None
        if token == output.token_ids[-2]:
            assert np.array_equal(one.allowed(), one.allowed())
    assert np.array_equal(one.allowed(), other.allowed()) and one.allowed().any()


def make_span(llm: LLM, params: SamplingParams) -> Span:
    matcher = None if params.structured_outputs is None else llm.llm_engine._make_matcher(params)
    request = Request(
        request_id="", prompt_token_ids=[1], params=params, max_tokens=5, arrival=0, seed=1, matcher=matcher
    )
    return Span(request, 0, 1, True)


def test_no_token_without_a_text_is_ever_drawn(open_llm, tiny) -> None:
    """Id 258 has no text, and 259 and more would be the padding of a vocabulary."""
    llm = open_llm()
    spans = [make_span(llm, ask(regex="a|z", temperature=0.0)), make_span(llm, ask(temperature=0.0))]
    logits = torch.zeros(2, 300)
    logits[:, 258:] = 9.0
    before = logits.clone()
    tokens = sample(logits, spans).tokens.tolist()
    assert llm.get_tokenizer().decode(tokens[:1]) in "az" and tokens[1] == 258
    assert torch.equal(logits[1], before[1])


def test_a_token_outside_the_grammar_ends_the_request_with_an_error(open_llm, monkeypatch) -> None:
    llm = open_llm()
    params = [ask(regex="abcd"), ask(regex="efgh"), ask(tokens=8, ignore_eos=True)]
    monkeypatch.setattr("nanovllm.structured.matcher.mask_logits", lambda *_: None)
    outputs = run(llm, [[1], [2], [3]], params)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error", "length"]
    monkeypatch.undo()
    assert [o.text for o in run(llm, [[1], [2]], params[:2])] == ["abcd", "efgh"]


def test_a_refused_request_leaves_the_engine_as_it_was(open_llm) -> None:
    llm = open_llm()
    free = SamplingParams(temperature=1.0, max_tokens=8)
    with pytest.raises(RequestError, match="(?s)prompt 1 of 2.*unclosed group") as error:
        run(llm, [[1], [2]], [free, ask(regex="(")])
    assert error.value.parameter == "regex" and error.value.value == "("
    assert not llm.llm_engine.has_unfinished_requests
    other = open_llm()
    with pytest.raises(RequestError):
        run(other, [2], ask(regex="("))
    fresh = open_llm()
    assert run(other, [1], free)[0].token_ids == run(fresh, [1], free)[0].token_ids, "the next seed was used up"


def test_an_engine_without_a_tokenizer_says_so(open_llm) -> None:
    llm = open_llm(skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="structured_outputs.*needs a tokenizer"):
        run(llm, [1], ask(regex="a"))


def test_a_model_without_an_end_ends_where_its_grammar_does(open_llm, monkeypatch) -> None:
    llm = open_llm()
    compiler = Compiler(llm.get_tokenizer(), frozenset())
    monkeypatch.setattr(llm.llm_engine, "_make_matcher", compiler.matcher)
    (output,) = run(llm, [1], ask(regex="[ab]{2,9}", ignore_eos=True))
    assert re.fullmatch("[ab]{9}", output.text) and output.outputs[0].finish_reason == "stop"


def test_an_end_where_the_text_may_not_end_is_an_error(open_llm, tiny) -> None:
    span = make_span(open_llm(), ask(regex="abcd"))
    span.request.eos_token_ids = frozenset({tiny.end})
    span.request.append(Sampled(tiny.end))
    assert span.request.finish_reason == "error"

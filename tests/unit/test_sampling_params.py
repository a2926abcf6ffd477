"""Sampling parameters: what is accepted, what is refused, and with which words."""

import copy
import inspect
import math
import pickle

import numpy as np
import pytest
import torch

from nanovllm.errors import RequestError, UnknownOptionError
from nanovllm.sampling_params import MAX_SEED, SAMPLING_FIELDS, SWITCHES, SamplingParams

NAN, INF = math.nan, math.inf


def test_the_defaults():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.min_tokens) == (
        1.0,
        1.0,
        0,
        64,
        0,
    )
    assert params.seed is params.logprobs is None
    assert params.stop == params.stop_strings == params.stop_token_ids == []
    assert params.detokenize and params.skip_special_tokens
    assert not (params.ignore_eos or params.include_stop_str_in_output or params.greedy)


def test_numbers_of_numpy_and_of_tensors_count_as_pythons():
    params = SamplingParams(
        n=np.int32(2), max_tokens=np.int64(5), temperature=np.float32(0.5), top_k=torch.tensor(3), ignore_eos=np.True_
    )
    assert params == SamplingParams(n=2, max_tokens=5, temperature=0.5, top_k=3, ignore_eos=True)
    assert [type(each) for each in (params.n, params.max_tokens, params.top_k, params.ignore_eos)] == [int] * 3 + [bool]
    for wrong in (np.float64(2.5), np.array([1]), np.datetime64("2026-01-01")):
        with pytest.raises(RequestError, match="max_tokens is .* it must be an integer of at least 1"):
            SamplingParams(max_tokens=wrong)


def test_fields_come_in_the_order_of_vllm():
    first = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k")
    assert SAMPLING_FIELDS[: len(first)] == first
    assert tuple(inspect.signature(SamplingParams.__init__).parameters)[1:] == SAMPLING_FIELDS
    assert SamplingParams(1, 0.0, 0.0, 1.0, 0.5, 0.9, 7) == SamplingParams(temperature=0.5, top_p=0.9, top_k=7)


REFUSED = [
    # what a number may be
    *(("temperature", value) for value in (-0.1, 2.1, NAN, INF, -INF, "1", None, True, [1.0], 1j)),
    *(("top_p", value) for value in (0.0, -0.5, 1.01, NAN, INF, "0.5", None, True)),
    *(("top_k", value) for value in (-2, 1.0, 1.5, "5", None, True, NAN)),
    *(("seed", value) for value in (MAX_SEED + 1, -MAX_SEED - 2, 1.0, "1", True, NAN)),
    *(("max_tokens", value) for value in (0, -1, 1.5, 2.0, "5", True, NAN, INF)),
    *(("min_tokens", value) for value in (-1, 1.0, "1", None, True, 65)),
    *(("logprobs", value) for value in (-2, 1.0, "1", False, NAN)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN, "1", None, True)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN, "1", None, True)),
    *(("repetition_penalty", value) for value in (0.0, 0, -1.0, 1e-50, 1e50, NAN, INF, "1", None, True)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, "0.1", None, True)),
    *(("output_kind", value) for value in (1, "DELTA", None)),
    *(("allowed_token_ids", value) for value in ([],)),
    *(("logprob_token_ids", value) for value in ([], list(range(129)))),
    *(("logit_bias", value) for value in ([1], 5, [(1, 2.0)], "1")),
    # what a switch may be
    *(
        (name, value)
        for name in SWITCHES
        for value in (0, 1, "yes", None)
    ),
    # what stops
    *(("stop", value) for value in ("", [""], ["a", ""], [1], ["a", None], b"ab", [b"a"])),
    *(("stop_token_ids", value) for value in ([-1], [1.0], ["1"], [None], [True], "12")),
    *(("prompt_logprobs", value) for value in (-2, 1.0, "1", False, NAN)),
    *(("prompt_logprob_start", value) for value in (-1, 1.0, True)),
    ("n", 0), ("n", 16_385), ("n", NAN), ("min_p", NAN), ("repetition_penalty", NAN),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: str(value)[:30])
def test_a_refusal_names_the_parameter_the_value_and_the_rule(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.parameter == name
    message = str(error)
    assert message.startswith(f"{name} is ")
    if not name.startswith("stop"):  # there the item at fault is named
        assert error.value is value or error.value == value
    assert f"{name} is {error.value!r}; it " in message and message.endswith(".")
    assert "must" in message


ITEMS = [
    *((name, item) for name in ("allowed_token_ids", "logprob_token_ids") for item in (-1, 1.0, "1", None, True)),
    *(("bad_words", item) for item in ("", " ", 1, None, b"x", "a\ud800")),
]


@pytest.mark.parametrize(("name", "item"), ITEMS, ids=str)
def test_the_item_of_a_list_that_is_at_fault_is_named(name, item):
    with pytest.raises(RequestError, match=f"{name} is .*; it must") as caught:
        SamplingParams(**{name: [{"bad_words": "fine"}.get(name, 3), item]})
    assert caught.value.parameter == name and caught.value.value is item


@pytest.mark.parametrize(
    "bias", [{-1: 1.0}, {"5": 1.0}, {1.0: 1.0}, {True: 1.0}, {5: "1"}, {5: NAN}, {5: INF}, {5: None}]
)
def test_a_bias_is_a_number_for_a_token(bias):
    with pytest.raises(RequestError, match=r"logit_bias is .*; it must be") as caught:
        SamplingParams(logit_bias={3: 1.0} | bias)
    assert caught.value.parameter == "logit_bias"


def test_what_a_caller_gave_is_not_changed():
    given = {
        "stop": ["a"], "stop_token_ids": [3, 3], "allowed_token_ids": [5, 4, 5], "logprob_token_ids": [1, 1],
        "logit_bias": {1: 200, 2: -200.0, 3: 1}, "bad_words": ["x"],
    }  # fmt: skip
    before = copy.deepcopy(given)
    params = SamplingParams(**given)
    assert given == before
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 1.0} and params.logit_bias is not given["logit_bias"]
    assert (params.allowed_token_ids, params.logprob_token_ids, params.bad_words) == ([5, 4], [1], ["x"])
    clone = params.clone()
    clone.logit_bias[7] = 1.0
    clone.bad_words.append("y")
    clone.allowed_token_ids.append(8)
    assert params == SamplingParams(**given)


def test_what_asks_for_work():
    assert not SamplingParams().penalizes
    for name, value in (("presence_penalty", 0.1), ("frequency_penalty", -0.1), ("repetition_penalty", 0.9)):
        assert SamplingParams(**{name: value}).penalizes
    found = [SamplingParams(logprobs=n, logprob_token_ids=ids).num_logprobs
             for n, ids in ((None, None), (None, [1]), (3, [1]), (0, None), (-1, None))]  # fmt: skip
    assert found == [None, 0, 3, 0, -1]


NOT_TYPED = [
    ("bad_words", 5),
    ("bad_words", "word"),
    ("allowed_token_ids", 5),
    ("allowed_token_ids", "12"),
    ("logprob_token_ids", 0),
    ("stop", 5),
    ("stop", 0),
    ("stop", False),
    ("stop_token_ids", 5),
    ("stop_token_ids", 0),
    ("stop_token_ids", [[1]]),
]


@pytest.mark.parametrize(("name", "value"), NOT_TYPED, ids=str)
def test_stops_of_no_sensible_type_are_refused_like_the_rest(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


def test_what_contradicts_is_refused():
    with pytest.raises(RequestError, match="min_tokens is 9; it must not exceed max_tokens=8"):
        SamplingParams(max_tokens=8, min_tokens=9)
    with pytest.raises(RequestError, match="prompt_logprob_start is 2; it needs prompt_logprobs"):
        SamplingParams(prompt_logprob_start=2)
    with pytest.raises(RequestError, match="stop is 'x'; it needs detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000
    assert SamplingParams(detokenize=False, stop=[]).stop_strings == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"temperature": 0}, {"temperature": 0.0, "greedy": True}),
        ({"temperature": 9e-6}, {"temperature": 9e-6, "greedy": True}),
        ({"temperature": 1e-5}, {"temperature": 0.01, "greedy": False}),
        ({"temperature": 0.009}, {"temperature": 0.01}),
        ({"temperature": 0.01}, {"temperature": 0.01}),
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"top_p": 1e-9}, {"top_p": 1e-9}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"top_k": 10**9}, {"top_k": 10**9}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 0}, {"seed": 0}),
        ({"seed": -2}, {"seed": -2}),
        ({"seed": MAX_SEED}, {"seed": MAX_SEED}),
        ({"seed": -MAX_SEED - 1}, {"seed": -MAX_SEED - 1}),
        ({"max_tokens": 1}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"min_tokens": 64}, {"min_tokens": 64}),
        ({"logprobs": True}, {"logprobs": 1}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"prompt_logprobs": True}, {"prompt_logprobs": 1}),
        ({"prompt_logprobs": -1, "prompt_logprob_start": 3}, {"prompt_logprobs": -1, "prompt_logprob_start": 3}),
        ({"n": 3, "temperature": 0}, {"n": 3, "greedy": True}),
        ({"stop": "end"}, {"stop_strings": ["end"]}),
        ({"stop": ("a", "b")}, {"stop_strings": ["a", "b"]}),
        ({"stop": None, "stop_token_ids": None}, {"stop_strings": [], "stop_token_ids": []}),
        ({"stop_token_ids": (3, 1, 3)}, {"stop_token_ids": [3, 1]}),
    ],
    ids=str,
)
def test_what_is_accepted_and_what_becomes_of_it(given, kept):
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in kept} == kept
    assert all(type(getattr(params, name)) is type(value) for name, value in kept.items())


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("stops", "stop"), ("topk", "top_k")],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(wrong, right):
    with pytest.raises(UnknownOptionError) as caught:
        SamplingParams(**{wrong: 1})
    message = str(caught.value)
    assert f"SamplingParams has no option {wrong!r}" in message and f"'{right}'?" in message
    assert caught.value.parameter == wrong
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)


def test_a_misspelt_attribute_is_refused():
    with pytest.raises(AttributeError):
        SamplingParams().temprature = 0.5


def full():
    return SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, seed=11, stop=["a", "b"], stop_token_ids=[1], max_tokens=None, logprobs=2
    )


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1)[2:])
def test_pickling(protocol):
    assert pickle.loads(pickle.dumps(full(), protocol)) == full()


def test_copying():
    params = full()
    for copied in (copy.copy(params), copy.deepcopy(params), params.clone()):
        assert copied == params and copied is not params
    clone = params.clone()
    clone.stop.append("c")
    clone.stop_token_ids.append(2)
    assert params == full(), "a clone shares a list"


def test_a_clone_is_checked_again():
    params = SamplingParams()
    params.temperature = -1
    with pytest.raises(RequestError, match="temperature is -1; it must be a number from 0 to 2"):
        params.clone()
    params.temperature, params.stop = 0.0, "word"
    assert params.stop_strings == ["word"] and params.clone().stop == ["word"]

"""What travels to replicas and back arrives as it was sent, and bytes that are no message are refused."""

import socket
import threading
from multiprocessing.connection import Connection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import EngineError, RequestError, SamplingParams
from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput
from nanovllm.parallel.data import joined
from nanovllm.parallel.messages import read_params, write_params
from nanovllm.parallel.wire import Line, Parts, Sheet, pack, read_prompt_rows, read_sample, unpack
from nanovllm.structured.params import StructuredOutputsParams

words = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)
floats = st.lists(st.floats(allow_nan=False), max_size=9)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()), words, floats, st.integers(0, 2**40))
def test_a_message_arrives_as_it_was_sent(text, integers, numbers, number):
    parts = unpack(pack(number, text, integers, numbers), number)
    assert parts.text == text
    assert parts.integers(len(integers)) == integers and parts.numbers(len(numbers)) == numbers
    parts.check_all_is_read()


@given(st.binary(max_size=80))
def test_bytes_that_are_no_message_are_refused(noise):
    with pytest.raises(EngineError, match="a replica's message"):
        unpack(noise, 0)


def test_a_message_that_is_cut_lengthened_changed_or_out_of_order_is_refused():
    good = pack(3, {"a": 1}, [1, 2], [0.5])
    for bad, number, reason in (
        (good[:-1], 3, "bytes long, not"), (good + b"x", 3, "bytes long, not"), (good[:10], 3, "10 bytes long"),
        (b"\0" + good[1:], 3, "has no header"), (good, 4, "is number 3, not 4"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=reason):
            unpack(bad, number)


def test_arrays_are_taken_as_far_as_they_go_and_no_further():
    parts = Parts({}, [1, 2], [0.5])
    assert parts.integers(1) == [1]
    with pytest.raises(EngineError, match="has 2 integers and numbers that belong to nothing"):
        parts.check_all_is_read()
    with pytest.raises(EngineError, match="too few integers"):
        parts.integers(2)
    for number in (-1, 2):
        with pytest.raises(EngineError, match="too few numbers"):
            parts.numbers(number)


def test_a_line_that_ends_says_so():
    ours, theirs = socket.socketpair()
    line, other = Line(Connection(ours.detach())), Line(Connection(theirs.detach()))
    line.send({"one": 1})
    line.send({"two": 2}, [7])
    assert other.receive().text == {"one": 1} and other.receive().integers(1) == [7]
    sender = threading.Thread(target=lambda: line.send({"much": "x" * 10**6}))
    sender.start()  # waits until it is read
    assert len(other.receive().text["much"]) == 10**6
    sender.join()
    other.channel.close()
    with pytest.raises(EOFError):
        line.receive()
    with pytest.raises(EOFError):
        line.send({"much": "x" * 10**6})
    line.channel.close()


PARAMS = [
    dict(), dict(n=3, temperature=0, seed=-5, stop=["a", "\ud800é"], stop_token_ids=(3, 3, 4), max_tokens=None),
    dict(logit_bias={3: 4.5, 0: -100}, allowed_token_ids=[3, 0], bad_words=["x y"], min_tokens=2),
    dict(logprobs=-1, prompt_logprobs=2, prompt_logprob_start=1, logprob_token_ids=[5], detokenize=False),
    dict(structured_outputs={"json": {"type": "object", "properties": {"a": {"enum": [1, None]}}}}),
    dict(presence_penalty=0.1, frequency_penalty=-0.2, repetition_penalty=1.1, top_p=0.3, top_k=4, min_p=0.1),
]  # fmt: skip


@pytest.mark.parametrize("options", PARAMS, ids=lambda options: ",".join(options) or "none")
def test_sampling_parameters_arrive_as_they_were_sent(options):
    params = SamplingParams(**options)
    sent = unpack(pack(0, {"params": write_params(params)}), 0).text["params"]
    assert read_params(sent) == params


def test_sampling_parameters_are_checked_when_they_arrive():
    regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-f]"))
    assert read_params(write_params(regex)).structured_outputs == {"regex": "[a-f]", "disable_any_whitespace": False}
    with pytest.raises(RequestError, match="top_p is 7"):
        read_params({"top_p": 7})
    with pytest.raises(TypeError, match="no option 'nonsense'"):
        read_params({"nonsense": 1})


class Rows:
    """Scores that are written down."""

    def __init__(self, entries):
        self.entries = entries

    def entry(self, row):
        return self.entries[row]

    def own(self, row):
        return next(iter(self.entries[row].values())).logprob


def test_outputs_arrive_as_they_were_sent():
    entries = [{5: Logprob(-0.1, 2), 7: Logprob(-0.05, 1)}, {9: Logprob(float("-inf"), None)}, {4: Logprob(0.0, 1)}]
    prompt = [None, None, {3: Logprob(-1.5, 4), 1: Logprob(-1e-30, 1)}]
    metrics = RequestMetrics(scheduled_ts=1.5, first_token_ts=2.5, last_token_ts=3.5, num_generation_tokens=4)
    samples = [
        CompletionOutput(1, "té\ud800", [5, 9, 4], -0.1, Logprobs([Rows(entries)] * 3, range(3)), "stop", "xé"),
        CompletionOutput(3, "", [], 0.0, Logprobs(), None, None),
        CompletionOutput(0, "a", [2**31 - 1], None, None, "stop", 77),
    ]
    output = RequestOutput("12", None, [1, 2, 3], samples, False, Logprobs([Rows(prompt)] * 3, range(3)), 8, metrics)
    sheet = Sheet()
    text = {"output": sheet.write(output, 2)}
    parts = unpack(pack(0, text, sheet.integers, sheet.numbers), 0)
    key, finished, times, counts, rows, written = parts.text["output"]
    assert (key, finished, times, counts, rows) == (12, False, [1.5, 2.5, 3.5], [4, 0, 8], 2)
    known = Logprobs([Rows(prompt)], [0])
    read_prompt_rows(rows, parts, known)
    assert known == prompt
    found = [read_sample(each, parts, str) for each in written]
    parts.check_all_is_read()
    named = [{token: Logprob(each.logprob, each.rank, str(token)) for token, each in one.items()} for one in entries]
    assert list(found[0].logprobs) == named and found[0].logprobs.total() == sum(map(Rows(entries).own, range(3)))
    for sample, other in zip(found, samples, strict=True):
        sample.logprobs = other.logprobs = None
        assert sample == other


def test_pieces_of_a_request_are_joined():
    def piece(*samples, finished=False):
        return RequestOutput("a", None, [1], [CompletionOutput(*sample) for sample in samples], finished)

    first = piece((0, "a", [1], -1.0, [{1: Logprob(-1.0)}]))
    last = piece((1, "x", [5]), (0, "b", [2], -3.0, [{2: Logprob(-2.0)}], "abort"), finished=True)
    whole = joined([first, last])
    assert whole.finished and [(sample.index, sample.text, sample.token_ids) for sample in whole.outputs] == [
        (0, "ab", [1, 2]), (1, "x", [5])
    ]  # fmt: skip
    assert whole.outputs[0].cumulative_logprob == -3.0 and len(whole.outputs[0].logprobs) == 2
    assert whole.outputs[0].finish_reason == "abort" and joined([]) is None

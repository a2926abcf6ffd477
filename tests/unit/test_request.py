"""One request: what ends it, in which order of precedence, and what may not be drawn yet."""

import pytest

from nanovllm.outputs import Logprob
from nanovllm.request import Request, Sampled, Status
from nanovllm.sampling_params import SamplingParams

END, STOP = 2, 7


class Builder:
    """Finds a stop string at given tokens; remembers what it was told."""

    def __init__(self, stops_at=()):
        self.stops_at = stops_at
        self.pushed = []

    def push(self, token_id, *, may_stop):
        self.pushed.append((token_id, may_stop))
        return "the end" if may_stop and token_id in self.stops_at else None


def request(*, max_tokens=5, eos=(END,), builder=None, **params):
    return Request(
        request_id="r",
        prompt_token_ids=[5, 6],
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        eos_token_ids=frozenset(eos),
        arrival=0,
        builder=builder,
    )


def draw(request, *tokens):
    for token in tokens:
        assert request.finish_reason is None, "it goes on after its end"
        request.append(Sampled(token))
    return request.finish_reason, request.stop_reason


def test_a_new_request():
    new = request()
    assert new.status is Status.WAITING and not new.is_finished
    assert new.token_ids == [5, 6] and new.token_ids is not new.prompt_token_ids
    assert (new.num_tokens, new.num_output_tokens, new.token_ids[len(new.prompt_token_ids) :]) == (2, 0, [])
    assert new != request(), "two requests are two, however alike"


class Scores(dict):
    """The entry of each row of a step."""

    entry = dict.__getitem__


def test_tokens_are_kept_with_their_logprobs():
    asked = request()
    entry = {3: Logprob(-0.5, 1)}
    sampled = Sampled(3, Scores({5: entry}), 5)
    assert sampled.logprobs == entry and Sampled(3).logprobs is None
    asked.append(sampled)
    asked.append(Sampled(4))
    assert (asked.token_ids[len(asked.prompt_token_ids) :], asked.num_tokens, asked.logprobs) == ([3, 4], 4, [entry])
    assert asked.prompt_token_ids == [5, 6]


def counted(counts):
    return {word & 0xFFFFFFFF: word >> 32 for word in counts.words}


def test_what_a_request_holds_is_counted_as_it_grows():
    assert request().counts is None
    both = request(max_tokens=9, repetition_penalty=1.1)
    output = request(max_tokens=9, presence_penalty=0.1)
    for asked in (both, output):
        draw(asked, 6, 9, 6, 3, 9, 6)
    assert counted(both.counts) == {5: 0, 6: 3, 9: 2, 3: 1} and len(both.counts.words) == 4
    assert counted(output.counts) == {6: 3, 9: 2, 3: 1}
    assert both.counts_until(8) is both.counts is both.counts_until(9)
    assert counted(both.counts_until(4)) == {5: 0, 6: 1, 9: 1} and counted(output.counts_until(4)) == {6: 1, 9: 1}
    large = request(max_tokens=None, repetition_penalty=1.1, eos=())
    large.max_tokens = 10**9
    draw(large, *[2**31 - 1] * 3)
    assert counted(large.counts)[2**31 - 1] == 3


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_length(max_tokens):
    assert draw(request(max_tokens=max_tokens), *[3] * max_tokens) == ("length", None)


def test_it_goes_on_until_something_ends_it():
    assert draw(request(), 3, 3, 3, 3) == (None, None)


def test_an_end_id_has_no_stop_reason_and_a_stop_id_is_its_own():
    assert draw(request(), 3, END) == ("stop", None)
    assert draw(request(stop_token_ids=[STOP]), 3, STOP) == ("stop", STOP)
    assert draw(request(eos=[END, STOP]), STOP) == ("stop", None)


def test_an_id_that_is_both_counts_as_the_models_own():
    assert draw(request(stop_token_ids=[END]), END) == ("stop", None)
    assert draw(request(eos=(), stop_token_ids=[END]), END) == ("stop", END)  # under ignore_eos


def test_ids_come_before_length():
    assert draw(request(max_tokens=2), 3, END) == ("stop", None)
    assert draw(request(max_tokens=2, stop_token_ids=[STOP]), 3, STOP) == ("stop", STOP)


def test_a_stop_string_completed_by_the_last_token_counts_as_a_stop():
    builder = Builder(stops_at=[4])
    assert draw(request(max_tokens=2, builder=builder), 3, 4) == ("stop", "the end")


def test_a_token_that_ends_by_its_id_adds_nothing_to_the_text():
    for last in (END, STOP):
        builder = Builder(stops_at=[END, STOP])
        draw(request(stop_token_ids=[STOP], builder=builder), 3, last)
        assert builder.pushed == [(3, True)]


def test_the_last_token_allowed_is_text():
    builder = Builder()
    draw(request(max_tokens=2, builder=builder), 3, 4)
    assert builder.pushed == [(3, True), (4, True)]


def test_nothing_but_length_ends_before_min_tokens():
    builder = Builder(stops_at=[3])
    asked = request(min_tokens=3, stop_token_ids=[STOP], builder=builder)
    assert draw(asked, 3, STOP) == (None, None)
    assert draw(asked, 3) == ("stop", "the end")
    assert builder.pushed == [(3, False), (STOP, False), (3, True)]


def test_min_tokens_equal_to_max_tokens_ends_by_either():
    assert draw(request(max_tokens=2, min_tokens=2), 3, END) == ("stop", None)
    assert draw(request(max_tokens=2, min_tokens=2), 3, 3) == ("length", None)

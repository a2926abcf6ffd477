"""Every limit of the one validator, exactly at the limit and one past it; and that a refusal changes nothing."""

import pytest

from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.errors import NanoError, RequestError, shown
from nanovllm.prompts import parse
from nanovllm.request import Sampled
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler

VOCAB = 50
HUGE = 10**5000
"""More digits than Python writes."""


class Runner:
    """Draws the token 7 for whoever draws."""

    lookahead = 0

    def submit(self, output):
        return lambda: [Sampled(7) if span.samples else None for span in output.spans]


class Door:
    """An engine of small limits: a context of 20 tokens, a cache of 24, unless told otherwise."""

    def __init__(self, *, context=20, blocks=6, seqs=4, budget=64, max_logprobs=5, policy="fcfs"):
        self.scheduler = Scheduler(
            BlockManager(blocks, 4), max_num_seqs=seqs, max_num_batched_tokens=budget, policy=policy
        )
        limits = Limits(
            max_model_len=context, vocab_size=VOCAB, max_logprobs=max_logprobs, by_priority=policy == "priority"
        )
        self.engine = LLMEngine(self.scheduler, Runner(), limits, encode=lambda text: [len(text)])

    def serve(self, prompt=(1, 2), *, priority=0, **params):
        """Add a request and finish it; the samples' (number of tokens, reason)."""
        self.engine.add_request("it", prompt, SamplingParams(**params), priority=priority)
        while self.engine.has_unfinished_requests:
            outputs = self.engine.step()
        assert not self.scheduler.blocks.num_held
        return [(len(sample.token_ids), sample.finish_reason) for sample in outputs[0].outputs]

    def refuse(self, parameter, rule, prompt=(1, 2), *, priority=0, **params):
        with pytest.raises(RequestError, match=rule) as caught:
            self.serve(prompt, priority=priority, **params)
        assert caught.value.parameter == parameter
        assert not self.engine.has_unfinished_requests and not self.scheduler.waiting
        assert self.serve(max_tokens=1) == [(1, "length")], "the engine is as it was"
        return caught.value


def test_the_context_holds_a_prompt_and_one_token():
    assert Door().serve([1] * 19) == [(1, "length")]
    error = Door().refuse("prompt", "20 tokens long.*max_model_len=20; shorten it", [1] * 20)
    assert error.value == "20 tokens long"


def test_the_output_ends_with_the_context():
    for asked, given in ((16, 16), (17, 17), (18, 18), (19, 18), (HUGE, 18), (None, 18)):
        assert Door().serve(max_tokens=asked) == [(given, "length")]


@pytest.mark.parametrize("wrong", [0, -1, -HUGE, 1.5, True, "3"], ids=shown)
def test_no_output_at_all_is_refused(wrong):
    Door().refuse("max_tokens", "max_tokens is .*; it must be an integer of at least 1", max_tokens=wrong)


def test_the_cache_holds_a_prompt():
    door = {"context": 1000, "blocks": 3}
    assert Door(**door).serve([1] * 12, max_tokens=9) == [(1, "length")]
    assert Door(**door).serve([1] * 11, max_tokens=9) == [(2, "length")]
    Door(**door).refuse("prompt", "13 tokens long.*3 blocks of 4 tokens; shorten it", [1] * 13)


def test_whoever_grows_past_the_cache_ends_and_harms_nobody():
    door = Door(context=1000, blocks=3)
    door.engine.add_request("grows", [1] * 4, SamplingParams(max_tokens=500))
    door.engine.add_request("waits", [2] * 10, SamplingParams(max_tokens=2))
    ended = {}
    while door.engine.has_unfinished_requests:
        for output in door.engine.step():
            ended[output.request_id] = (len(output.token_ids), output.outputs[0].finish_reason)
    assert ended == {"grows": (9, "length"), "waits": (2, "length")}


def test_a_huge_prompt_is_refused_before_its_tokens_are_looked_at():
    class Far:
        """Four million places, and no token of them may be read one by one."""

        def __len__(self):
            return 4_000_000

        def __iter__(self):
            raise AssertionError("somebody reads it")

    with pytest.raises(RequestError, match="4000000 tokens long"):
        Door().engine.check(Far(), SamplingParams(), 0, "")


@pytest.mark.parametrize("wrong", [VOCAB, -1, HUGE, -HUGE, True, 1.0, "1", None], ids=shown)
def test_prompts_hold_ids_of_the_vocabulary(wrong):
    Door().serve([0, VOCAB - 1], max_tokens=1)
    Door().refuse("prompt_token_ids", "must hold integers from 0 to 49", [1, wrong])


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_parameters_name_ids_of_the_vocabulary(name):
    Door().serve(max_tokens=1, **{name: [VOCAB - 1]})
    for past in (VOCAB, HUGE):
        Door().refuse(name, "must hold integers from 0 to 49", **{name: [1, past]})


def test_a_bias_is_for_ids_of_the_vocabulary():
    Door().serve(max_tokens=1, logit_bias={VOCAB - 1: 1.0})
    Door().refuse("logit_bias", "must hold integers from 0 to 49", logit_bias={VOCAB: 1.0})


def test_as_many_log_probabilities_as_the_engine_allows():
    Door().serve(max_tokens=1, logprobs=5)
    for past in (6, VOCAB, -1):
        Door().refuse("logprobs", "must not exceed max_logprobs=5", logprobs=past)


def test_without_a_limit_there_are_as_many_as_there_are_tokens():
    """More would fail in the step, and with it everybody else's requests."""
    for allowed in (VOCAB, -1):
        Door(max_logprobs=-1).serve(max_tokens=1, logprobs=allowed)
    for past in (VOCAB + 1, HUGE):
        Door(max_logprobs=-1).refuse("logprobs", "must not exceed the vocabulary of 50", logprobs=past)


@pytest.mark.parametrize("seqs", [1, 3])
def test_more_samples_than_may_run_take_turns(seqs):
    """``max_num_seqs`` bounds what runs together, not what may be asked for."""
    for number in (seqs, seqs + 1, 2 * seqs + 1):
        assert Door(seqs=seqs).serve(n=number, max_tokens=3) == [(3, "length")] * number


def test_a_prompt_has_a_bounded_number_of_samples():
    assert SamplingParams(n=16_384).n == 16_384
    for past in (0, 16_385, HUGE):
        Door().refuse("n", "must be an integer from 1 to 16384", n=past)


def test_a_priority_is_not_ignored():
    for priority in (1, -1, -(2**63), 2**63 - 1):
        error = Door().refuse("priority", 'needs scheduling_policy="priority"', priority=priority)
        assert error.value == priority
        assert Door(policy="priority").serve(max_tokens=1, priority=priority) == [(1, "length")]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_priority_has_64_bits(policy):
    for past in (-(2**63) - 1, 2**63, HUGE, 1.0, True, None, float("inf")):
        Door(policy=policy).refuse("priority", "must be an integer of 64 bits", priority=past)


def test_what_is_no_request_at_all_is_refused():
    door = Door()
    for prompt, params, parameter in (
        (5, SamplingParams(), "prompt_token_ids"), (None, SamplingParams(), "prompt_token_ids"),
        ([1], None, "params"), ([1], {"max_tokens": 3}, "params"), ([], SamplingParams(), "prompt"),
        ("text", SamplingParams(), "prompt_token_ids"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            door.engine.add_request(None, prompt, params)
        assert caught.value.parameter == parameter
    assert not door.engine.has_unfinished_requests


@pytest.mark.parametrize("name", ["n", "seed", "top_k", "min_tokens", "logprobs", "max_tokens", "stop_token_ids"])
def test_a_number_that_python_does_not_write_is_refused_all_the_same(name):
    value = [-HUGE] if name == "stop_token_ids" else -HUGE
    with pytest.raises(NanoError, match=rf"{name} is .*more than 4,300 digits") as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    with pytest.raises(RequestError, match="a prompt is dict with an integer of more than 4,300 digits"):
        parse({"x": HUGE})


def test_a_message_shows_the_ends_of_what_is_long():
    assert shown([1, "a"]) == "[1, 'a']" and len(shown("x" * 998)) == 1000
    assert shown(list(range(10**4))).startswith("[0, 1,") and shown(list(range(10**4))).endswith("9998, 9999]")
    assert len(shown("x" * 999)) == 1000

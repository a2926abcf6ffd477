"""``n > 1``: samples of one prompt share its blocks, and each is what it would be alone.

The runner draws a token as a hash of the seed and of the whole history.
"""

from collections import Counter
from dataclasses import replace
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine, derive_seed, sample_seed
from nanovllm.errors import EngineError, RequestError
from nanovllm.request import Sampled
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler

VOCAB, END = 7, 6
QUICK = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def next_token(seed, tokens):
    return crc32(bytes(tokens) + seed.to_bytes(9, "big", signed=True)) % VOCAB


def alone(seed, prompt, max_tokens, *, ends=True):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(seed, tokens))
        if ends and tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class Hashing:
    """Counts the prompt tokens it computes; fails once when told."""

    def __init__(self, lookahead=0):
        self.lookahead = lookahead
        self.drawn = {}
        self.prompt_tokens = Counter()
        self.fail_at = None
        self.steps = 0

    def submit(self, output):
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("broken")
        found = []
        for span in output.spans:
            request = span.request
            prompt = len(request.prompt_token_ids)
            self.prompt_tokens[request.request_id] += max(0, min(span.stop, prompt) - span.start)
            tokens = self.drawn.setdefault(request, list(request.prompt_token_ids))
            if span.samples:
                if len(tokens) == span.stop:
                    tokens.append(next_token(request.seed, tokens))
                found.append(Sampled(tokens[span.stop]))
            else:
                found.append(None)
        return lambda: found


def engine_of(*, blocks=200, budget=64, seqs=8, lookahead=0, caching=True):
    scheduler = Scheduler(
        BlockManager(blocks, 4, enable_prefix_caching=caching), max_num_seqs=seqs, max_num_batched_tokens=budget
    )
    limits = Limits(max_model_len=500, vocab_size=VOCAB, eos_token_ids=frozenset({END}))
    return LLMEngine(scheduler, Hashing(lookahead), limits)


def finish(engine):
    """Step until nothing is left: all outputs, by request."""
    outputs = {}
    for _ in range(5000):
        if not engine.has_unfinished_requests:
            assert engine.scheduler.blocks.num_held == 0
            assert not engine.scheduler.running and not engine.scheduler.waiting
            engine.scheduler.blocks.check()
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the work does not end")


@QUICK
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 25),
                  st.booleans(), st.integers(0, 6)),
        min_size=1, max_size=4,
    ),
    budget=st.sampled_from([3, 8, 64]), blocks=st.sampled_from([13, 200]), lookahead=st.integers(0, 1),
    caching=st.booleans(),
)  # fmt: skip
def test_each_sample_is_what_its_seed_gives_alone(jobs, budget, blocks, lookahead, caching):
    """In pools where samples preempt each other, under chunks, arrivals one after the other, streamed or not."""
    engine = engine_of(budget=budget, blocks=blocks, lookahead=lookahead, caching=caching)
    outputs = {}
    for name, (n, prompt, max_tokens, stream, wait) in enumerate(jobs):
        params = SamplingParams(n=n, seed=name, max_tokens=max_tokens)
        engine.add_request(str(name), prompt, params, stream=stream)
        for _ in range(wait):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
    for name, late in finish(engine).items():
        outputs.setdefault(name, []).extend(late)
    for name, (n, prompt, max_tokens, stream, _) in enumerate(jobs):
        found = outputs[str(name)]
        assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
        assert stream or [completion.index for completion in found[0].outputs] == list(range(n))
        tokens, ends = {index: [] for index in range(n)}, Counter()
        for output in found:
            assert [c.index for c in output.outputs] == sorted({c.index for c in output.outputs})
            for completion in output.outputs:
                assert not ends[completion.index], "something came after the end"
                tokens[completion.index] += completion.token_ids
                ends[completion.index] += completion.finished()
        assert ends == dict.fromkeys(range(n), 1)
        for index in range(n):
            expected = alone(sample_seed(name, index), prompt, max_tokens)
            assert tokens[index] == expected


def test_the_prompt_is_computed_once():
    """Number 0 computes it; the others find its full blocks and compute the rest, one block at most."""
    for length, rest in ((21, 1), (20, 4), (4, 4), (3, 3)):
        for budget in (5, 64):
            engine = engine_of(budget=budget)
            engine.add_request("a", [1] * length, SamplingParams(n=4, seed=1, max_tokens=3))
            finish(engine)
            assert engine._runner.prompt_tokens["a"] == length + 3 * rest
    engine = engine_of(caching=False)  # nothing can be found: each computes its own
    engine.add_request("a", [1] * 21, SamplingParams(n=4, seed=1, max_tokens=3))
    finish(engine)
    assert engine._runner.prompt_tokens["a"] == 4 * 21


def test_samples_hold_the_blocks_of_the_prompt_together():
    engine = engine_of()
    engine.add_request("a", [1] * 41, SamplingParams(n=4, seed=3, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.running) == 4
    assert engine.scheduler.blocks.num_held == 10 + 4, "ten full blocks of the prompt, and one of each sample"
    engine.abort("a")
    assert engine.scheduler.blocks.num_held == 0


def test_samples_that_wait_keep_nobody_else_waiting():
    engine = engine_of(budget=8)
    engine.add_request("many", [1] * 30, SamplingParams(n=3, seed=1, max_tokens=2))
    engine.add_request("one", [2], SamplingParams(max_tokens=1, seed=1))
    outputs = [output.request_id for _ in range(5) for output in engine.step()]
    assert outputs == ["one"]
    assert [len(output.outputs) for output in finish(engine)["many"]] == [3]


@pytest.mark.parametrize("steps", range(7))
def test_abort_ends_all_samples_wherever_they_are(steps):
    """Waiting, running, and some ended already."""
    engine = engine_of(budget=8, seqs=2)
    engine.add_request("a", [1] * 9, SamplingParams(n=3, seed=2, max_tokens=30, ignore_eos=True))
    engine.add_request("b", [1] * 9, SamplingParams(n=2, seed=2, max_tokens=4))
    for _ in range(steps):
        engine.step()
    output = engine.abort("a")
    assert output.finished and [c.finish_reason for c in output.outputs] == ["abort"] * 3
    for index, completion in enumerate(output.outputs):
        expected = alone(sample_seed(2, index), [1] * 9, 30)
        assert completion.token_ids[: len(expected)] == expected[: len(completion.token_ids)]
    assert engine.abort("a") is None
    (found,) = finish(engine)["b"]
    assert [c.token_ids for c in found.outputs] == [alone(sample_seed(2, index), [1] * 9, 4) for index in range(2)]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("steps", range(12))
def test_abort_of_a_stream_says_each_end_once(steps, lookahead):
    """Some samples have ended by then, and their last pieces were given out; all outputs tell of the first's hits."""
    engine = engine_of(lookahead=lookahead)
    params = SamplingParams(n=4, seed=2, max_tokens=11)
    engine.add_request("a", [1] * 9, params, stream=True)
    outputs = [output for _ in range(steps) for output in engine.step()]
    outputs.append(engine.abort("a"))
    found = [(each.index, each.finish_reason) for output in outputs for each in output.outputs if each.finished()]
    assert sorted(index for index, _ in found) == [0, 1, 2, 3]
    assert {output.num_cached_tokens for output in outputs} == {0}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert finish(engine) == {}
    if steps == 8:
        assert {reason for _, reason in found} == {"stop", "abort"}, "the test would prove nothing"


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("stream", [False, True])
def test_samples_in_a_step_that_fails_do_not_take_the_others_with_them(fail_at, stream):
    engine = engine_of(seqs=2)  # so that some wait while the step fails
    engine._runner.fail_at = fail_at
    engine.add_request("a", [1] * 9, SamplingParams(n=4, seed=5, max_tokens=6), stream=stream)
    found, failures = [], 0
    while engine.has_unfinished_requests:
        try:
            found += engine.step()
        except EngineError as error:
            failures += 1
            found += error.outputs
    assert failures == 1 and found[-1].finished
    tokens, reasons = {index: [] for index in range(4)}, {}
    for output in found:
        for completion in output.outputs:
            tokens[completion.index] += completion.token_ids
            reasons[completion.index] = completion.finish_reason
    assert "error" in reasons.values() and {"stop", "length"} & set(reasons.values())
    for index in range(4):
        expected = alone(sample_seed(5, index), [1] * 9, 6)
        assert (
            tokens[index] == expected if reasons[index] != "error" else tokens[index] == expected[: len(tokens[index])]
        )
    assert engine.scheduler.blocks.num_held == 0


@settings(QUICK, max_examples=400)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.booleans()), min_size=1, max_size=3
    ),
    blocks=st.integers(3, 8), lookahead=st.integers(0, 1),
    fails=st.dictionaries(st.integers(1, 60), st.booleans(), max_size=8),
)  # fmt: skip
def test_each_sample_ends_once_whatever_steps_fail(jobs, blocks, lookahead, fails):
    """Some fail when they are submitted, some when they are fetched, in pools where samples end for want of blocks."""
    engine = engine_of(blocks=blocks, lookahead=lookahead)
    runner, submit = engine._runner, engine._runner.submit

    def failing(output):
        fetch, late = submit(output), fails.get(runner.steps)
        if late is False:
            raise RuntimeError("broken")
        return fetch if late is None else lambda: 1 / 0

    runner.submit = failing
    for name, (n, length, max_tokens, stream) in enumerate(jobs):
        params = SamplingParams(n=n, seed=name, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(str(name), [1] * length, params, stream=stream)
    found = []
    while engine.has_unfinished_requests:
        try:
            found += engine.step()
        except EngineError as error:
            found += error.outputs
    for name, (n, length, max_tokens, _) in enumerate(jobs):
        outputs = [output for output in found if output.request_id == str(name)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for index in range(n):
            pieces = [each for output in outputs for each in output.outputs if each.index == index]
            assert [piece.finished() for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            tokens = [token for piece in pieces for token in piece.token_ids]
            assert tokens == alone(sample_seed(name, index), [1] * length, len(tokens), ends=False)
            assert pieces[-1].finish_reason == "error" or len(tokens) == min(max_tokens, 4 * blocks - length + 1)
    assert not engine._ended and not engine._streaming, "nothing is left for a step that never comes"
    assert engine.scheduler.blocks.num_held == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_sample_whose_text_cannot_be_built_ends_alone(lookahead):
    class Fragile:
        def since(self, start):
            return ""

        def push(self, token_id, *, may_stop):
            if self.fails:
                raise LookupError("no such token")

        def finish(self):
            self.push(0, may_stop=False)  # a tokenizer that fails once fails again

    made = []

    def make(params):
        made.append(Fragile())
        made[-1].fails = len(made) == 2
        return made[-1]

    engine = engine_of(lookahead=lookahead)
    engine._make_builder = make
    engine.add_request("a", [1], SamplingParams(n=3, seed=5, max_tokens=6))
    ((output,),) = finish(engine).values()
    assert [c.finish_reason == "error" for c in output.outputs] == [False, True, False]
    assert output.outputs[2].token_ids == alone(sample_seed(5, 2), [1], 6)
    made.clear()
    engine.add_request("a", [1], SamplingParams(n=3, seed=5, max_tokens=6))
    assert [c.finish_reason for c in engine.abort("a").outputs] == ["abort"] * 3
    assert finish(engine) == {}


def test_seeds_differ_and_are_those_of_the_request():
    seeds = [[sample_seed(seed, index) for index in range(50)] for seed in (0, 1, -1, 2**63 - 1)]
    assert [each[0] for each in seeds] == [0, 1, -1, 2**63 - 1]
    assert len({seed for each in seeds for seed in each}) == 200
    assert not {derive_seed(0, arrival) for arrival in range(1000)} & {sample_seed(0, index) for index in range(1000)}
    for seed in (None, 9):
        runs = []
        for _ in range(2):
            engine = engine_of()
            engine.add_request("a", [1], SamplingParams(n=4, seed=seed, max_tokens=9))
            runs.append([c.token_ids for c in finish(engine)["a"][0].outputs])
        assert runs[0] == runs[1] and len(set(map(tuple, runs[0]))) == 4


def test_what_n_may_be():
    for wrong in (0, -1, 16_385, 1.0, True, "2", None):
        with pytest.raises(RequestError, match="n is") as caught:
            SamplingParams(n=wrong)
        assert caught.value.parameter == "n"
    assert replace(SamplingParams(n=16_384), max_tokens=3).n == 16_384

"""Each prompt token's log-probability comes once and in order, whatever happens to its request; without a model.

What the runner tells of a place is a hash of the prompt up to the next token. It also watches that no row that has
still to tell something is taken from the cache.
"""

from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.outputs import Logprob
from nanovllm.request import Sampled
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler

VOCAB = 7
QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def entries(prompt, start):
    return [None] * (start + 1) + [entry(prompt, end) for end in range(start + 2, len(prompt) + 1)]


def entry(prompt, end):
    return {prompt[end - 1]: Logprob(float(crc32(bytes(prompt[:end]))), end)}


class Telling:
    """Tells what it is asked, at once or a step late."""

    def __init__(self, lookahead):
        self.lookahead = lookahead
        self.drawn = {}
        self.following = {}
        """The next place of each request that has to tell something."""
        self.told = 0

    def entry(self, row):
        return entry(*row)

    def submit(self, output):
        found = []
        for span in output.spans:
            request, prompt = span.request, span.request.prompt_token_ids
            places = request.unscored(span.start, span.stop)
            if request.prompt_logprobs is not None:
                following = self.following.setdefault(request, len(request.prompt_logprobs) - 1)
                assert span.start <= following or following >= len(prompt) - 1, "a row was taken from the cache"
                assert not places or places.start == following, "a row tells twice, or not at all"
                self.following[request] = places.stop if places else following
                self.told += len(places)
            tokens = self.drawn.setdefault(request, list(prompt))
            if span.samples and len(tokens) == span.stop:
                tokens.append(crc32(bytes(tokens)) % VOCAB)
            one = Sampled(tokens[span.stop]) if span.samples else None
            if places:
                told = (places.start + 1, self, [(prompt, place + 2) for place in places])
                one = (one or Sampled(-1))._replace(prompt=told)
            found.append(one)
        return lambda: found


@QUICK
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 3), st.lists(st.integers(0, 2), min_size=1, max_size=24), st.integers(1, 25),
                  st.one_of(st.none(), st.integers(0, 23)), st.booleans(), st.integers(0, 6)),
        min_size=1, max_size=4,
    ),
    budget=st.sampled_from([2, 5, 64]), blocks=st.sampled_from([13, 200]), lookahead=st.integers(0, 1),
    caching=st.booleans(), abort=st.one_of(st.none(), st.integers(0, 20)),
)  # fmt: skip
def test_each_place_is_told_once(jobs, budget, blocks, lookahead, caching, abort):
    """In pools where requests preempt each other, under chunks, several samples, arrivals one after the other."""
    scheduler = Scheduler(
        BlockManager(blocks, 4, enable_prefix_caching=caching), max_num_seqs=8, max_num_batched_tokens=budget
    )
    runner = Telling(lookahead)
    engine = LLMEngine(scheduler, runner, Limits(max_model_len=500, vocab_size=VOCAB))
    outputs = []
    for name, (n, prompt, max_tokens, start, stream, wait) in enumerate(jobs):
        asked = {} if start is None else dict(prompt_logprobs=0, prompt_logprob_start=min(start, len(prompt) - 1))
        engine.add_request(str(name), prompt, SamplingParams(n=n, max_tokens=max_tokens, **asked), stream=stream)
        for _ in range(wait):
            outputs += engine.step()
    for step in range(5000):
        if step == abort and (aborted := engine.abort("0")) is not None and aborted.prompt_logprobs is not None:
            expected = entries(jobs[0][1], min(jobs[0][3], len(jobs[0][1]) - 1))
            assert aborted.prompt_logprobs == expected[: len(aborted.prompt_logprobs)]
        if not engine.has_unfinished_requests:
            break
        outputs += engine.step()
    assert not engine.has_unfinished_requests and scheduler.blocks.num_held == 0
    wanted = 0
    for output in outputs:
        _, prompt, _, start, *_ = jobs[int(output.request_id)]
        if start is None:
            assert output.prompt_logprobs is None
        elif any(sample.token_ids for sample in output.outputs):
            assert output.prompt_logprobs == entries(prompt, min(start, len(prompt) - 1))
        wanted += 0 if start is None or not output.finished else len(prompt) - 1 - min(start, len(prompt) - 1)
    assert abort is not None or runner.told == wanted


@pytest.mark.parametrize("start", [0, 5, 8, 11])
def test_what_a_preempted_request_knows_it_may_find(start):
    """A request that comes back computes no row again that has told all it can, where the cache has it."""
    scheduler = Scheduler(BlockManager(6, 4), max_num_seqs=4, max_num_batched_tokens=4)
    engine = LLMEngine(scheduler, Telling(0), Limits(max_model_len=100, vocab_size=VOCAB))
    request = engine.add_request(
        "a", [1, 2] * 6, SamplingParams(prompt_logprobs=0, prompt_logprob_start=start, max_tokens=2)
    )
    engine.step()
    engine.step()
    known = len(request.prompt_logprobs)
    assert request.num_computed_tokens == 8 and known == max(9, start + 1)
    scheduler.running.remove(request)
    scheduler.blocks.free(request)
    assert scheduler.blocks.admit(request) and request.num_computed_tokens == 8

"""What a worker rebuilds of a step is what the scheduler decided, whatever happens to the requests meanwhile."""

import random
import struct

import pytest

from nanovllm.block_manager import BlockManager
from nanovllm.errors import EngineError
from nanovllm.outputs import Logprobs, Unscored
from nanovllm.parallel.messages import HEADER, SPAN, Describer, Mirror
from nanovllm.request import Request, Sampled
from nanovllm.sampling_params import SAMPLING_FIELDS, RequestOutputKind, SamplingParams
from nanovllm.scheduler import Scheduler


def no_grammars():
    raise AssertionError("nobody asked for a grammar")


def view(span):
    """What computing and drawing read of a span's request."""
    request = span.request
    params = {name: getattr(request.params, name) for name in SAMPLING_FIELDS if name != "output_kind"}
    counts = None if request.counts is None else sorted(request.counts.words)
    return (
        span.start, span.stop, span.samples, request.prompt_token_ids, request.token_ids, request.block_ids,
        request.seed, request.eos_token_ids, request.bad_words, request.max_tokens, request.adjusts, counts, params,
        request.unscored(span.start, span.stop),
    )  # fmt: skip


def some_params(rng):
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7]), top_p=rng.choice([1.0, 0.9]), top_k=rng.choice([0, 5]),
        repetition_penalty=rng.choice([1.0, 1.3]), max_tokens=rng.randint(1, 25), logprobs=rng.choice([None, 3]),
        logit_bias=rng.choice([None, {3: 1.5, 60: -2.0}]), stop_token_ids=rng.choice([None, [5, 6]]),
        allowed_token_ids=rng.choice([None, list(range(50))]), seed=rng.choice([None, -(2**63), 7]),
        output_kind=RequestOutputKind.DELTA, stop=["x"], bad_words=["y"],
    )  # fmt: skip


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_mirror_shows_each_step_as_it_was_decided(lookahead):
    preemptions, most = zip(*(play(random.Random(seed), lookahead) for seed in range(40)), strict=True)
    assert sum(preemptions) > 40 and max(most) >= 5, "the workloads ask for nothing"


def drawn(rng, span):
    """What a runner may have found: mostly a token that is allowed, once in a while that there is none."""
    places, prompt = span.request.unscored(span.start, span.stop), None
    if places:
        prompt = (places.start + 1, Unscored(), range(len(places)))
    if not span.samples:
        return Sampled(-1, prompt=prompt) if prompt else None
    allowed = span.request.params.allowed_token_ids
    return Sampled(-1 if rng.random() < 0.01 else rng.randrange(50 if allowed else 64), prompt=prompt)


def play(rng, lookahead):
    """Run one workload through scheduler and mirror; return its preemptions and the most requests in the mirror."""
    scheduler = Scheduler(BlockManager(11, 4, enable_prefix_caching=True), max_num_seqs=6, max_num_batched_tokens=16)
    describer, mirror = Describer(), Mirror(no_grammars)
    under_way, made, slots = [], 0, 0
    for _ in range(120):
        if made < 14 and rng.random() < 0.6:
            prompt = [rng.randrange(64) for _ in range(rng.randint(1, 9))]
            request = Request(
                request_id=str(made), prompt_token_ids=prompt, params=(params := some_params(rng)), arrival=made,
                max_tokens=params.max_tokens, seed=rng.randrange(2**63), eos_token_ids=frozenset({63}),
                bad_words=((1, 2), (3,)),
                prompt_logprobs=Logprobs([Unscored()], [0]) if rng.random() < 0.3 else None,
            )  # fmt: skip
            scheduler.add(request)
            made += 1
        if scheduler.running and rng.random() < 0.05:
            scheduler.abort(rng.choice(scheduler.running))
        output = scheduler.schedule()
        if output.spans:
            read = mirror.read(describer.describe(output))
            assert [view(span) for span in read.spans] == [view(span) for span in output.spans]
            assert read.spoiled == output.spoiled
            if rng.random() < 0.1:  # Ctrl-C before it was computed: decided again
                scheduler.undo(output)
                continue
            under_way.append(output)
        if under_way and (not output.spans or len(under_way) > lookahead):
            step = under_way.pop(0)
            scheduler.update(step, [drawn(rng, span) for span in step.spans])
        slots = max(slots, len(mirror._requests))
    assert made == 14 and slots <= 8, "ended requests are dropped, and slots used again"
    return scheduler.num_preemptions, slots


@pytest.fixture
def message():
    scheduler = Scheduler(BlockManager(14, 4), max_num_seqs=6, max_num_batched_tokens=16)
    scheduler.add(Request(request_id="", prompt_token_ids=[1, 2, 3], params=SamplingParams(), max_tokens=4, arrival=0))
    return Describer().describe(scheduler.schedule())


def test_a_message_is_small(message):
    assert len(message) - message.index(b"[{") < 200
    assert message.index(b"[{") == 4 * (HEADER + SPAN + 3 + 1)


@pytest.mark.parametrize("word", range(HEADER))
@pytest.mark.parametrize("value", [-1, 1, 2**31 - 1])
def test_a_damaged_header_is_refused(message, word, value):
    if struct.unpack_from("=i", message, 4 * word)[0] == value:
        value += 1
    damaged = bytearray(message)
    struct.pack_into("=i", damaged, 4 * word, value)
    with pytest.raises(EngineError, match="a step's description"):
        Mirror(no_grammars).read(bytes(damaged))


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 60, -1])
def test_a_cut_message_is_refused(message, cut):
    with pytest.raises(EngineError, match="a step's description"):
        Mirror(no_grammars).read(message[:cut])


@pytest.mark.parametrize(("place", "value"), [(0, 5), (1, -1), (1, 3), (4, 9), (4, -3), (5, 2), (5, -1), (6, 0)])
def test_a_damaged_span_is_refused(message, place, value):
    damaged = bytearray(message)
    struct.pack_into("=i", damaged, 4 * (HEADER + place), value)
    with pytest.raises(EngineError, match="a step's description"):
        Mirror(no_grammars).read(bytes(damaged))


def test_a_message_out_of_order_is_refused(message):
    mirror = Mirror(no_grammars)
    mirror.read(message)
    with pytest.raises(EngineError, match="is number 0, not 1"):
        mirror.read(message)

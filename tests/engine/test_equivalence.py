"""The law: a request's output is a function of its prompt, its parameters and its seed, and of nothing else.

Tiny float32 models through the public class. Tokens must be equal; log-probabilities may differ by what rounding
does to a softmax over logits that spread over 1 (about 1e-5; the bound is ten times that).
"""

import random
from itertools import pairwise

import pytest

from nanovllm import SamplingParams
from nanovllm.errors import RequestError

ATOL = 1e-4
FAMILIES = ("llama", "qwen3", "mistral")
LENGTHS = (1, 7, 8, 9, 16, 23, 40, 3, 33, 12, 5, 17, 2, 31, 20, 11, 26)


def greedy(tokens: int = 12, **changes) -> SamplingParams:
    return SamplingParams(**{**dict(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=5), **changes})


def sampled(seed: int, tokens: int = 12, **changes) -> SamplingParams:
    return SamplingParams(
        **{**dict(temperature=0.9, seed=seed, max_tokens=tokens, ignore_eos=True, logprobs=2), **changes}
    )


def draw_prompts(number: int = 17, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(LENGTHS[place % len(LENGTHS)])] for place in range(number)]


def run(llm, prompts, params, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def assert_same(found, expected) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason
        if one.outputs[0].logprobs is None:
            continue
        for left, right in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert next(iter(left)) == next(iter(right))
            for token in set(left) & set(right):
                assert left[token].logprob == pytest.approx(right[token].logprob, abs=ATOL)
            # the last of the best may swap places where two are as good as equal, never more
            assert len(set(left) & set(right)) >= len(left) - 1


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def known() -> dict:
    """Answers of ``alone``, for many tests ask the same."""
    return {}


@pytest.fixture
def alone(family, open_llm, known):
    """Each request by itself, computed in one piece, with nothing cached: what everything else must equal."""

    def compute(prompts, params):
        each = params if isinstance(params, list) else [params] * len(prompts)
        llm = None
        outputs = []
        for prompt, one in zip(prompts, each, strict=True):
            key = (family, tuple(prompt), repr(one))
            if key not in known:
                llm = open_llm(family, enable_prefix_caching=False) if llm is None else llm
                (known[key],) = run(llm, prompt, one)
            outputs.append(known[key])
        return outputs

    return compute


# D1: chunks


@pytest.mark.parametrize("budget", [1, 3, 7, 8, 9, 64, 4096])
def test_chunks(family, open_llm, alone, budget):
    prompts = draw_prompts(6)
    expected = alone(prompts, greedy(8))
    llm = open_llm(family, max_num_batched_tokens=budget, enable_prefix_caching=False)
    assert_same(run(llm, prompts, greedy(8)), expected)


@pytest.mark.parametrize("size", [1, 3, 16, 128])
def test_block_sizes(family, open_llm, alone, size):
    prompts = draw_prompts(6)
    llm = open_llm(family, block_size=size, num_gpu_blocks_override=-(-512 // size))
    assert_same(run(llm, prompts, greedy(8)), alone(prompts, greedy(8)))


# D2: the prefix cache


def test_prefix_cache_cold_warm_and_reset(family, open_llm, alone):
    prompts = [list(range(100, 100 + length)) for length in (8, 9, 16, 17, 30)]  # each begins the next
    expected = alone(prompts, greedy())
    llm = open_llm(family)
    cold = [run(llm, prompt, greedy())[0] for prompt in prompts]
    assert_same(cold, expected)
    # a hit covers whole blocks, and never the last token of a prompt
    assert [output.num_cached_tokens for output in cold] == [0, 8, 8, 16, 16]
    warm = [run(llm, prompt, greedy())[0] for prompt in prompts]
    assert_same(warm, expected)
    assert [output.num_cached_tokens for output in warm] == [0, 8, 8, 16, 24]
    together = run(llm, prompts, greedy())
    assert_same(together, expected)
    assert [output.num_cached_tokens for output in together] == [0, 8, 8, 16, 24]
    assert llm.reset_prefix_cache() is True
    assert_same(run(llm, prompts[-1:], greedy()), expected[-1:])
    assert len(llm.llm_engine.scheduler.blocks._cached) > 0


def test_outputs_are_cached_as_well(family, open_llm, alone):
    """A conversation: the next prompt is the last one, its answer, and more."""
    llm = open_llm(family)
    prompt = list(range(50, 61))
    for turn in range(3):
        (output,) = run(llm, prompt, greedy(14))
        assert_same([output], alone([prompt], greedy(14)))
        assert output.num_cached_tokens == (0 if turn == 0 else (len(prompt) - 4) // 8 * 8)
        prompt = prompt + output.token_ids + [turn, 7, 9]


def test_evicted_prefixes_are_computed_again(family, open_llm, alone):
    first, others = list(range(40)), draw_prompts(6, seed=3)
    llm = open_llm(family, num_gpu_blocks_override=9)
    (expected,) = alone([first], greedy())
    (before,) = run(llm, first, greedy())
    for prompt in others:
        run(llm, prompt, greedy())
    assert llm.llm_engine.scheduler.blocks.num_evictions > 0
    (after,) = run(llm, first, greedy())
    assert_same([before, after], [expected, expected])
    assert after.num_cached_tokens < 32
    assert run(llm, first, greedy())[0].num_cached_tokens == 32


def test_salts_do_not_share(open_llm):
    llm, tokens = open_llm(), list(range(30))
    outputs = [run(llm, {"prompt_token_ids": tokens, "cache_salt": salt}, greedy())[0] for salt in ("a", "b", "a")]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 24]
    assert_same(outputs[1:], outputs[:1] * 2)


def test_without_prefix_caching_nothing_is_found(open_llm):
    llm, tokens = open_llm(enable_prefix_caching=False), list(range(30))
    assert [run(llm, tokens, greedy())[0].num_cached_tokens for _ in range(2)] == [0, 0]
    assert len(llm.llm_engine.scheduler.blocks._cached) == 0


def test_pinned_prefixes_outlive_eviction(family, open_llm, alone):
    shared, others = list(range(20)), draw_prompts(8, seed=4)
    llm = open_llm(family, num_gpu_blocks_override=10)
    with llm.cache_prefix(shared) as prefix:
        assert prefix.num_tokens == 16
        assert llm.llm_engine.scheduler.blocks.num_held == 2
        assert llm.reset_prefix_cache() is False
        for prompt in others:
            run(llm, prompt, greedy())
        (output,) = run(llm, [*shared, 1, 2, 3], greedy())
        assert output.num_cached_tokens == 16
        assert_same([output], alone([[*shared, 1, 2, 3]], greedy()))
    assert llm.llm_engine.scheduler.blocks.num_held == 0
    prefix.unpin()  # a second time does nothing
    assert llm.llm_engine.scheduler.blocks.num_held == 0
    assert llm.reset_prefix_cache() is True
    assert run(llm, [*shared, 1, 2, 3], greedy())[0].num_cached_tokens == 0


def test_a_prefix_that_finds_no_room_is_refused(open_llm):
    """Other pins hold the cache: what could be pinned of it would be less than was asked for."""
    llm = open_llm(num_gpu_blocks_override=8)
    with llm.cache_prefix(list(range(48))):
        for length in (17, 40):
            with pytest.raises(RequestError, match="Unpin some"):
                llm.cache_prefix(list(range(100, 100 + length)))
        assert llm.llm_engine.scheduler.blocks.num_held == 6
        with llm.cache_prefix([1] * 16) as other:
            assert other.num_tokens == 16


# D3: neighbours


@pytest.mark.parametrize("size", [2, 5, 17])
def test_alone_or_among_others(family, open_llm, alone, size):
    prompts = draw_prompts(4)
    expected = alone(prompts, greedy())
    llm = open_llm(family, num_gpu_blocks_override=400)
    draw = random.Random(size)
    for trial, prompt in enumerate(prompts):
        fillers = draw_prompts(size - 1, seed=100 + trial)
        place = draw.randrange(size)
        params = [greedy(draw.randint(1, 20)) for _ in fillers]
        outputs = run(llm, [*fillers[:place], prompt, *fillers[place:]], [*params[:place], greedy(), *params[place:]])
        assert_same([outputs[place]], [expected[trial]])


def test_sampling_does_not_see_the_batch(family, open_llm, alone):
    prompts = draw_prompts(9)
    kinds = [
        dict(),
        dict(top_k=7),
        dict(top_p=0.8),
        dict(top_k=20, top_p=0.5),
        dict(temperature=0.3),
        dict(temperature=0.0),
    ]
    params = [sampled(1000 + place, **kinds[place % len(kinds)]) for place in range(len(prompts))]
    expected = alone(prompts, params)
    assert len({tuple(output.token_ids) for output in expected}) == len(prompts)
    for seed, options in enumerate(
        [{}, dict(max_num_batched_tokens=5), dict(num_gpu_blocks_override=9), dict(block_size=3)]
    ):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        llm = open_llm(family, **options)
        outputs = run(llm, [prompts[place] for place in order], [params[place] for place in order])
        assert_same(outputs, [expected[place] for place in order])


def test_arrival_order_and_number_of_seats(family, open_llm, alone):
    prompts = draw_prompts(10)
    expected = alone(prompts, greedy())
    for seats in (1, 3, 256):
        llm = open_llm(family, max_num_seqs=seats)
        order = random.Random(seats).sample(range(len(prompts)), len(prompts))
        outputs = run(llm, [prompts[place] for place in order], greedy())
        assert_same(outputs, [expected[place] for place in order])


def test_priorities_change_the_order_and_nothing_else(family, open_llm, alone):
    prompts = draw_prompts(8)
    llm = open_llm(family, scheduling_policy="priority", max_num_seqs=2, num_gpu_blocks_override=12)
    ended: list[int] = []
    step = llm.llm_engine.step

    def watched():
        outputs = step()
        ended.extend(prompts.index(output.prompt_token_ids) for output in outputs)
        return outputs

    llm.llm_engine.step = watched
    outputs = run(llm, prompts, greedy(), priority=[5, 5, 5, 1, 5, 0, 5, 9])
    assert_same(outputs, alone(prompts, greedy()))
    assert set(ended[:2]) == {3, 5}
    assert ended[-1] == 7


# D4: preemption


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize(("blocks", "size"), [(3, 8), (5, 4), (6, 4), (6, 8)])
def test_preempted_requests_go_on_as_if_nothing_had_happened(family, open_llm, alone, blocks, size, caching):
    room = blocks * size
    prompts = [prompt[: room // 3] for prompt in draw_prompts(7)]
    params = [sampled(place, room // 2) if place % 2 else greedy(room // 2) for place in range(len(prompts))]
    expected = alone(prompts, params)
    llm = open_llm(family, num_gpu_blocks_override=blocks, block_size=size, enable_prefix_caching=caching)
    assert_same(run(llm, prompts, params), expected)
    assert llm.llm_engine.scheduler.num_preemptions > 0


def test_a_request_that_outgrows_the_pool_ends_and_harms_no_other(family, open_llm, alone):
    prompts = draw_prompts(3)
    params = [greedy(60), greedy(6), greedy(6)]
    llm = open_llm(family, num_gpu_blocks_override=4)
    outputs = run(llm, prompts, params)
    (whole,) = alone(prompts[:1], greedy(60))
    assert_same(outputs[1:], alone(prompts[1:], greedy(6)))
    assert outputs[0].outputs[0].finish_reason == "length"
    # four blocks of 8 hold 32 tokens, and one more is known that needs no place
    assert len(outputs[0].token_ids) == 33 - len(prompts[0])
    assert outputs[0].token_ids == whole.token_ids[: len(outputs[0].token_ids)]


# D5: decode equals prefill


@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=3), dict(num_gpu_blocks_override=6)], ids=str)
def test_each_decoded_token_is_what_a_fresh_prefill_says(family, open_llm, options):
    prompts = draw_prompts(4, seed=1)
    prompts = [prompt[:20] for prompt in prompts]
    outputs = run(open_llm(family, **options), prompts, greedy(10))
    fresh = open_llm(family, enable_prefix_caching=False)
    for output in outputs:
        longer = [output.prompt_token_ids + output.token_ids[:count] for count in range(10)]
        for place, again in enumerate(run(fresh, longer, greedy(1))):
            assert again.token_ids == [output.token_ids[place]]
            left, right = again.outputs[0].logprobs[0], output.outputs[0].logprobs[place]
            for token in set(left) & set(right):
                assert left[token].logprob == pytest.approx(right[token].logprob, abs=ATOL)


# Everything at once


@pytest.mark.parametrize("seed", range(5))
def test_random_workloads(family, open_llm, alone, seed):
    """Shared prefixes, mixed parameters, small pools and budgets, two calls on one engine."""
    draw = random.Random(seed)
    stem = [draw.randrange(256) for _ in range(24)]
    prompts = [
        stem[: draw.randint(0, 24)] + [draw.randrange(256) for _ in range(draw.randint(1, 12))] for _ in range(9)
    ]
    params = [
        greedy(draw.randint(1, 20))
        if draw.random() < 0.5
        else sampled(place, draw.randint(1, 20), top_k=draw.choice((0, 9)))
        for place in range(9)
    ]
    size = draw.choice((1, 4, 8))
    llm = open_llm(
        family, block_size=size, num_gpu_blocks_override=-(-draw.randint(57, 90) // size),
        max_num_batched_tokens=draw.choice((1, 5, 16, 512)), max_num_seqs=draw.choice((1, 4, 32)),
    )  # fmt: skip
    expected = alone(prompts, params)
    assert_same(run(llm, prompts, params), expected)
    assert_same(run(llm, prompts[::-1], params[::-1]), expected[::-1])


# What comes back


def test_logprobs_name_the_drawn_token_first_and_rank_it(open_llm):
    llm = open_llm()
    for output in run(
        llm, draw_prompts(5), [greedy(), sampled(1), sampled(2, logprobs=0), greedy(logprobs=1), sampled(3)]
    ):
        completion = output.outputs[0]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.cumulative_logprob == pytest.approx(
            sum(next(iter(entry.values())).logprob for entry in completion.logprobs)
        )
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert next(iter(entry)) == token
            assert all(one.logprob <= 0 for one in entry.values())
            ranked = sorted(entry.values(), key=lambda one: one.rank)
            assert all(left.logprob >= right.logprob for left, right in pairwise(ranked))
            best = [one.rank for one in list(entry.values())[1:]]
            assert sorted({entry[token].rank, *best}) == sorted(one.rank for one in entry.values())


def test_the_number_of_logprobs(open_llm):
    llm = open_llm()
    for number in (0, 1, 5, 20):
        for params in (greedy(logprobs=number), sampled(4, logprobs=number)):
            for entry in run(llm, [1, 2, 3], params)[0].outputs[0].logprobs:
                assert max(number, 1) <= len(entry) <= number + 1
                assert {one.rank for one in entry.values()} >= set(range(1, number + 1))
    assert run(llm, [1, 2, 3], greedy(logprobs=None))[0].outputs[0].logprobs is None


def test_greedy_tokens_have_rank_one(open_llm):
    for entry in run(open_llm(), [1, 2, 3], greedy(20))[0].outputs[0].logprobs:
        assert next(iter(entry.values())).rank == 1


def test_logprobs_are_of_the_model_not_of_the_sampler(open_llm):
    """Temperature and filters change what is drawn, not what is reported."""
    llm = open_llm()
    plain = run(llm, [5, 6, 7], greedy(1, logprobs=20))[0].outputs[0].logprobs[0]
    for changes in (dict(temperature=0.1), dict(top_k=1), dict(top_p=0.01), dict(temperature=2.0, top_k=3)):
        entry = run(llm, [5, 6, 7], sampled(1, 1, logprobs=20, **changes))[0].outputs[0].logprobs[0]
        for token in set(entry) & set(plain):
            assert entry[token].logprob == pytest.approx(plain[token].logprob, abs=1e-6)


def test_sampling_narrowed_to_one_token_is_greedy(open_llm):
    llm = open_llm()
    expected = run(llm, draw_prompts(3), greedy())
    for changes in (dict(top_k=1), dict(top_p=1e-6), dict(temperature=1e-6)):
        outputs = run(llm, draw_prompts(3), sampled(9, **changes))
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_the_engine_seed_decides_for_requests_without_one(folders, open_llm):
    unseeded = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = [run(open_llm(seed=seed), [[1, 2, 3]] * 2, unseeded) for seed in (0, 0, 1)]
    tokens = [[output.token_ids for output in outputs] for outputs in runs]
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
    assert tokens[0][0] != tokens[0][1], "two requests of one call draw different seeds"

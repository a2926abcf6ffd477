"""Engines of several replicas give what one engine gives: tokens, order, names; and each has its part of the work."""

import os
import signal
import threading
import time

import pytest
import torch

from nanovllm import ConfigError, EngineError, RequestError, SamplingParams
from nanovllm.parallel.fleet import first_devices

PROMPTS = [[1, 2, 3, 4, 5], [7] * 30, [9, 8], list(range(100, 160)), [255, 0], [3] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=12)


def assert_same(found, expected):
    """Compare all that must not depend on the number of replicas; numbers but for the last bits, which steps change."""
    assert [facts(output) for output in found] == [facts(output) for output in expected]
    for ours, theirs in zip(map(numbers, found), map(numbers, expected), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def facts(output):
    samples = [
        (each.index, each.text, each.token_ids, each.finish_reason, each.stop_reason, entries(each.logprobs))
        for each in output.outputs
    ]
    prompt = (output.request_id, output.prompt, output.prompt_token_ids, entries(output.prompt_logprobs))
    return *prompt, output.finished, samples


def entries(logprobs):
    return logprobs and [entry and {token: found.decoded_token for token, found in entry.items()} for entry in logprobs]


def numbers(output):
    lists = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
    found = [one.logprob for each in lists for entry in each or () for one in (entry or {}).values()]
    return found + [each.cumulative_logprob or 0.0 for each in output.outputs]


def tokens(outputs):
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.fixture
def alone(open_llm):
    with open_llm("qwen3", 1) as llm:
        yield llm


@pytest.fixture(scope="module")
def shared_pair(open_replicas):
    with open_replicas("qwen3", 2) as llm:
        engine = llm.llm_engine
        yield llm
    with pytest.raises(EngineError, match="the engine is lost: it was closed"):
        engine.add_request(None, [1], GREEDY)


@pytest.fixture
def pair(shared_pair):
    """Nothing cached, and its arrival numbers from 0, so that it draws what a new engine draws."""
    engine = shared_pair.llm_engine
    assert shared_pair.reset_prefix_cache() and engine.desk.balancer.queued == [0, 0]
    engine._arrivals = iter(range(10**9))
    engine.desk.work[:] = [type(work)() for work in engine.desk.work]
    return shared_pair


def test_seeds_follow_from_the_order_of_requests_alone(alone, pair):
    """Over three calls; a request that brings a seed and one that is refused count, or do not, as with one engine."""
    engines = (alone, pair)
    calls = [
        [each.generate(PROMPTS[:4], DRAWN, use_tqdm=False) for each in engines],
        [each.generate(PROMPTS, [DRAWN, *[SamplingParams(seed=4)] * 5], use_tqdm=False) for each in engines],
    ]
    for each in engines:
        with pytest.raises(RequestError):
            each.generate([[1], []], DRAWN, use_tqdm=False)
    calls.append([each.generate(PROMPTS[:2], DRAWN, use_tqdm=False) for each in engines])
    assert all(work.requests for work in pair.llm_engine.work)
    for expected, found in calls:
        assert_same(found, expected)
    assert len({tuple(each) for each in tokens(calls[0][0])}) == 4, "they are draws"


EACH = [
    dict(temperature=0, ignore_eos=True, logprobs=3),
    dict(temperature=0.9, n=3, prompt_logprobs=2),
    dict(temperature=0, prompt_logprobs=0, prompt_logprob_start=1, logprobs=0, logprob_token_ids=[5]),
    dict(temperature=1.0, stop=["a", "é", "B"], include_stop_str_in_output=True),
    dict(temperature=1.0, stop_token_ids=list(range(60)), bad_words=["a"], logit_bias={200: 3.0}),
    dict(temperature=0.7, structured_outputs={"regex": "[a-f]{3}(,[0-9]{2}){2}"}),
    dict(temperature=1.0, seed=1, n=2, repetition_penalty=1.5, min_tokens=3, detokenize=False),
]


@pytest.mark.parametrize("options", EACH, ids=lambda options: ",".join(options))
def test_two_replicas_give_what_one_engine_gives(alone, pair, options):
    params = SamplingParams(max_tokens=10, **options)
    prompts = [*PROMPTS, "some text", {"prompt": "salted", "cache_salt": "s"}]
    if "prompt_logprob_start" in options:
        prompts = PROMPTS
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (alone, pair))
    assert_same(found, expected)
    assert all(work.requests and work.output_tokens for work in pair.llm_engine.work)
    assert pair.llm_engine.desk.balancer.queued == [0, 0], "also of those that ended early"


def test_times_and_counts_come_with_each_output(pair):
    before = time.perf_counter()
    for output in pair.generate(PROMPTS, GREEDY, use_tqdm=False):
        times = output.metrics
        assert before <= times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
        assert times.num_generation_tokens == 12 and times.num_preemptions == 0
    assert sum(work.output_tokens for work in pair.llm_engine.work) == 12 * len(PROMPTS)
    assert sum(work.prompt_tokens for work in pair.llm_engine.work) == sum(map(len, PROMPTS))


def test_work_is_divided_by_tokens(pair):
    """One long request is as much as eight short ones."""
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=length) for length in [160, *[17] * 8]]
    pair.generate([[token, 1, 2] for token in range(9)], params, use_tqdm=False)
    first, second = pair.llm_engine.work
    assert (first.requests, second.requests) == (1, 8)
    assert (first.output_tokens, second.output_tokens) == (160, 136)
    assert pair.llm_engine.desk.balancer.queued == [0, 0]


def test_prompts_with_the_same_beginning_meet_in_one_cache(pair):
    """Two documents, asked by turns: each has its replica, as long as queues do not differ by what it is worth."""
    documents = [[token] * 48 for token in (1, 2)]
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for question in range(6):
        found = pair.generate([[*document, 50 + question] for document in documents], short, use_tqdm=False)
        assert [output.num_cached_tokens for output in found] == ([48, 48] if question else [0, 0])
    assert [work.requests for work in pair.llm_engine.work] == [6, 6]
    assert [work.cached_tokens for work in pair.llm_engine.work] == [5 * 48, 5 * 48]
    salted = [{"prompt_token_ids": documents[0], "cache_salt": "other"}]
    assert pair.generate(salted, short, use_tqdm=False)[0].num_cached_tokens == 0
    assert pair.reset_prefix_cache()
    before = pair.llm_engine.work[0].requests
    assert pair.generate([documents[1]], short, use_tqdm=False)[0].num_cached_tokens == 0
    assert pair.llm_engine.work[0].requests == before + 1, "it has no replica any more"


def test_one_beginning_of_all_is_known_to_all(pair):
    """Else one replica would do everything."""
    prompts = [[*[5] * 48, number] for number in range(16)]
    pair.generate(prompts, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert [work.requests for work in pair.llm_engine.work] == [8, 8]


def test_pieces_come_while_it_computes_and_are_the_whole(alone, pair):
    params = SamplingParams(temperature=1.0, max_tokens=20, n=2, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    expected = alone.generate(PROMPTS, params, use_tqdm=False)
    pieces = list(pair.stream(PROMPTS, params))
    assert len(pieces) > 10 * len(PROMPTS)
    for place, output in enumerate(expected):
        own = [piece for piece in pieces if piece.request_id == str(place)]
        assert [piece.finished for piece in own] == [False] * (len(own) - 1) + [True]
        assert entries(own[-1].prompt_logprobs) == entries(output.prompt_logprobs)
        for sample in output.outputs:
            parts = [each for piece in own for each in piece.outputs if each.index == sample.index]
            assert "".join(each.text for each in parts) == sample.text
            assert [token for each in parts for token in each.token_ids] == sample.token_ids
            assert entries([entry for each in parts for entry in each.logprobs]) == entries(sample.logprobs)
            assert parts[-1].cumulative_logprob == pytest.approx(sample.cumulative_logprob, abs=1e-4)
            assert parts[-1].finish_reason == sample.finish_reason


def test_a_stream_that_is_left_leaves_nothing(alone, pair):
    expected = tokens(alone.generate(PROMPTS, GREEDY, use_tqdm=False))
    for _ in range(2):
        stream = pair.stream([[token] for token in range(10)], LONG)
        next(stream)
        stream.close()
        assert not pair.llm_engine.has_unfinished_requests and pair.llm_engine.desk.balancer.queued == [0, 0]
        assert pair.reset_prefix_cache(), "a replica with requests would refuse"
        assert tokens(pair.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_an_abort_returns_what_there_was(pair):
    """Of a request that is given out at its end, and of one that streams, with pieces that nobody has taken."""
    engine = pair.llm_engine
    engine.add_request("whole", [1, 2], LONG)
    engine.add_request("pieces", [3, 4], LONG, stream=True)
    with pytest.raises(RequestError, match="request_id is 'whole'"):
        engine.add_request("whole", [1, 2], LONG)
    taken = []
    while sum(len(piece.token_ids) for piece in taken) < 20:
        taken += engine.step()
    whole, pieces = engine.abort("whole"), engine.abort("pieces")
    assert engine.abort("whole") is None and engine.abort("never") is None
    assert whole.outputs[0].finish_reason == pieces.outputs[0].finish_reason == "abort"
    assert 0 < len(whole.token_ids) < 200 and whole.finished and pieces.finished
    assert not engine.has_unfinished_requests
    engine.add_request("pieces", [3, 4], LONG)
    while engine.has_unfinished_requests:
        news = engine.step()
    begun = [token for piece in (*taken, pieces) for token in piece.token_ids]
    assert news[0].token_ids[: len(begun)] == begun and len(begun) < 200


def test_a_step_waits_for_news_and_does_not_spin(pair):
    engine = pair.llm_engine
    engine.add_request(None, [1, 2], LONG)
    steps, cpu = 0, time.thread_time()
    started = time.perf_counter()
    while engine.has_unfinished_requests:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - started
    assert steps <= seconds / 0.02 + 2 and time.thread_time() - cpu < 0.2 * seconds + 0.02


def test_a_step_returns_while_replicas_are_silent(pair):
    """So that Ctrl-C, and what other threads want, need not wait for them."""
    engine = pair.llm_engine
    frozen = [worker.process.pid for worker in engine._fleet._workers]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        engine.add_request(None, [1, 2], GREEDY)
        started = time.perf_counter()
        assert [engine.step() for _ in range(3)] == [[], [], []]
        assert time.perf_counter() - started < 0.5
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    while engine.has_unfinished_requests:
        (output,) = engine.step() or [None]
    assert len(output.token_ids) == 12


def test_observers_see_requests_come_and_end(pair):
    seen = []

    class Watcher:
        def on_arrival(self, request):
            seen.append(("arrival", request.request_id, request.index))

        def on_end(self, request):
            seen.append(("end", request.request_id, request.finish_reason, request.num_output_tokens))

    pair.llm_engine.observers.append(Watcher())
    pair.generate([[1]], SamplingParams(n=2, max_tokens=3, ignore_eos=True), use_tqdm=False)
    pair.llm_engine.observers.clear()
    assert seen == [("arrival", "0", 0), ("arrival", "0", 1), ("end", "0", "length", 3), ("end", "0", "length", 3)]


def test_scores_and_beams_work_on_top(alone, pair):
    pairs = [llm.score([[1, 2, 3], [7] * 30], [[[4], [5, 6]], [[8, 9]]]) for llm in (alone, pair)]
    for ours, theirs in zip(*pairs, strict=True):
        assert [score.logprob for score in ours] == pytest.approx([score.logprob for score in theirs], abs=1e-4)


def test_ctrl_c_leaves_the_engine_as_it_was(pair):
    """It is sent to the whole group of processes, as a terminal does; replicas are in none of it."""
    expected = tokens(pair.generate([[1, 2, 3]], GREEDY, use_tqdm=False))
    pids = [os.getpid(), *(worker.process.pid for worker in pair.llm_engine._fleet._workers)]
    for _ in range(2):
        timer = threading.Timer(0.1, lambda: [os.kill(pid, signal.SIGINT) for pid in pids])
        timer.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(50):
                pair.generate([[1, 2, 3], [4]] * 8, LONG, use_tqdm=False)
        assert time.monotonic() - started < 1.5
        timer.join()
        assert pair.llm_engine.desk.balancer.queued == [0, 0]
        assert tokens(pair.generate([[1, 2, 3]], GREEDY, use_tqdm=False)) == expected


def test_what_reaches_one_process_alone_is_refused(pair):
    for call, name in (
        (lambda: pair.update_weights([]), "update_weights"),
        (lambda: pair.cache_prefix([1] * 20), "cache"),
    ):
        with pytest.raises(ConfigError, match=f"{name}.* needs data_parallel_size=1, not 2") as error:
            call()
        assert error.value.parameter == "data_parallel_size" and error.value.value == 2


def test_what_is_refused_starts_nothing(open_replicas, folders, tmp_path, traces):
    with pytest.raises(ConfigError, match="data_parallel_size is 0; it must be a whole number of at least 1"):
        open_replicas("qwen3", 0)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3; .* Sizes for this model: 1, 2"):
        open_replicas("qwen3", 2, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="compile is True"):
        open_replicas("qwen3", 2, tensor_parallel_size=2, compile=True)
    traces()


def test_fewer_devices_than_replicas_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,6")
    cuda = torch.device("cuda")
    with pytest.raises(
        ConfigError, match="data_parallel_size is 2 and tensor_parallel_size 2; .* there are 3 with CUDA_"
    ):
        first_devices(cuda, 2, 2)
    assert first_devices(cuda, 3, 1) == [0, 1, 2] and first_devices(torch.device("cpu"), 2, 9) == [None, None]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert first_devices(cuda, 4, 2) == [2, 4, 6, 0]
    with pytest.raises(ConfigError, match="device is 'cuda:1'; with data_parallel_size=2 it must be 'cuda'"):
        first_devices(torch.device("cuda:1"), 2, 1)

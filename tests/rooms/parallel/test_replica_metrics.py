"""Replicas count what their outputs say, answer in the middle of a step, and say so when one is lost."""

import asyncio
import os
import signal
import threading
import time

import pytest

from nanovllm import AsyncLLM, ConfigError, EngineError, SamplingParams
from nanovllm.metrics import Histogram, exposition
from nanovllm.metrics.figures import BOUNDS, METRICS, Buckets
from nanovllm.parallel import fleet, guard
from nanovllm.parallel.wire import Line

PROMPTS = [[1, 2, 3, 4, 5], [7] * 30, [9, 8], list(range(100, 160)), [255, 0], [3] * 9, [7] * 30]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SECONDS = 10.0
NOW = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "tokens_per_second", "cache_config_info")
"""What tells how it is, and does not grow."""


def counted(llm, replica=None):
    """{(name, own label): number} of all that grows, of histograms count, sum and buckets; of a replica, or of all."""
    found = {}
    for figure in llm.get_metrics(per_replica=replica is not None):
        name = figure.name.removeprefix("nanovllm:")
        engine = "all" if replica is None else str(replica)
        if name in NOW or figure.labels["engine"] != engine:
            continue
        own = tuple(text for label, text in figure.labels.items() if label not in ("engine", "model_name"))
        if isinstance(figure, Histogram):
            found |= {(name, bound): number for bound, number in figure.buckets.items()}
            found |= {(name, "count"): figure.count, (name, "sum"): figure.sum}
        else:
            assert (name, *own) not in found
            found[(name, *own)] = figure.value
    return found


def grown(before, after):
    assert before.keys() == after.keys() and all(after[key] >= before[key] for key in before)
    return {key: after[key] - before[key] for key in after}


def now(llm, name, engine="all"):
    """The value of a gauge."""
    figures = llm.get_metrics(per_replica=engine != "all")
    return next(each.value for each in figures if each.name == f"nanovllm:{name}" and each.labels["engine"] == engine)


@pytest.fixture(scope="module")
def pair(open_replicas):
    with open_replicas("qwen3", 2) as llm:
        yield llm


@pytest.fixture
def gate(tmp_path, plant):
    """Let each step wait until the file that is returned is there."""
    path = tmp_path / "go on"
    wait = f"while not os.path.exists({str(path)!r}): __import__('time').sleep(0.005)"
    plant("nanovllm.model_runner.ModelRunner", "submit", 0, wait)
    return path


def freeze(pid):
    """Stop a process that this one has started, and wait until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])


def soon(call):
    """Return what a call returns, or raise what it raises; fail if it does not end."""
    found, failures = [], []

    def run():
        try:
            found.append(call())
        except EngineError as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    for error in failures:
        raise error
    assert found, "it waits for something that does not come"
    return found[0]


def sums_of(outputs, params):
    """What outputs of requests that each had one sample say of all that is not by step."""
    seen = {name: [] for name in METRICS}
    for output in outputs:
        times, number = output.metrics, len(output.token_ids)
        decoding = times.last_token_ts - times.first_token_ts
        for name, value in {
            "time_to_first_token_seconds": times.first_token_ts - times.queued_ts,
            "request_time_per_output_token_seconds": decoding / (number - 1),
            "e2e_request_latency_seconds": times.last_token_ts - times.queued_ts,
            "request_queue_time_seconds": times.scheduled_ts - times.queued_ts,
            "request_inference_time_seconds": times.last_token_ts - times.scheduled_ts,
            "request_prefill_time_seconds": times.first_token_ts - times.scheduled_ts,
            "request_decode_time_seconds": decoding,
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": number,
            "request_params_n": 1,
            "request_params_max_tokens": params.max_tokens,
        }.items():
            seen[name].append(value)
    found = {}
    for name, values in seen.items():
        if values:
            buckets = Buckets(BOUNDS[METRICS[name].bounds])
            for value in values:
                buckets.add(value)
            read = buckets.read(name, {})
            found |= {(name, bound): number for bound, number in read.buckets.items()}
            found |= {(name, "count"): read.count, (name, "sum"): read.sum}
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    drawn = sum(len(output.token_ids) for output in outputs)
    return found | {
        ("prompt_tokens",): prompt, ("prompt_tokens_cached",): cached, ("prefix_cache_queries",): prompt,
        ("prefix_cache_hits",): cached, ("generation_tokens",): drawn, ("num_preemptions",): 0,
        ("request_success", "length"): len(outputs), ("request_success", "stop"): 0,
        ("request_success", "abort"): 0, ("request_success", "error"): 0,
        ("inter_token_latency_seconds", "count"): drawn - len(outputs),
    }  # fmt: skip


def test_the_sums_are_those_of_the_outputs(pair):
    """All that they tell, bucket by bucket, with times from the arrival in the user's process; twice, for prefixes."""
    before = counted(pair)
    outputs = [output for _ in range(2) for output in pair.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert sum(output.num_cached_tokens for output in outputs) > 0
    found = grown(before, counted(pair))
    expected = sums_of(outputs, GREEDY)
    assert {key: found[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    spans = found["iteration_tokens_total", "sum"]
    assert spans == found["prompt_tokens",] - found["prompt_tokens_cached",] + found["generation_tokens",] - len(
        outputs
    )
    assert found["num_steps",] == found["step_requests", "count"] >= 24 and found["step_seconds", "submit"] > 0
    assert found["step_requests", "sum"] >= 12 * len(outputs)


def test_what_each_has_counted_adds_up_and_is_the_work_it_was_given(pair):
    before, work_before = [counted(pair, place) for place in range(2)], pair.llm_engine.work
    total_before = counted(pair)
    pair.generate(PROMPTS, SamplingParams(n=2, max_tokens=5, ignore_eos=True), use_tqdm=False)
    pair.generate(PROMPTS[1:], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    each = [grown(before[place], counted(pair, place)) for place in range(2)]
    total = grown(total_before, counted(pair))
    assert total == pytest.approx({key: each[0][key] + each[1][key] for key in total}, abs=1e-6)
    for found, work, earlier in zip(each, pair.llm_engine.work, work_before, strict=True):
        assert found["generation_tokens",] == work.output_tokens - earlier.output_tokens > 0
    assert total["request_success", "length"] == 2 * len(PROMPTS) + len(PROMPTS) - 1
    assert total["request_params_n", "sum"] == 2 * 2 * len(PROMPTS) + len(PROMPTS) - 1
    assert [now(pair, name) for name in NOW[:3]] == [0, 0, 0]


def test_a_replica_without_requests_counts_nothing(pair):
    before = [counted(pair, place) for place in range(2)]
    (output,) = pair.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    each = [grown(before[place], counted(pair, place)) for place in range(2)]
    idle = [place for place in range(2) if not any(each[place].values())]
    assert len(idle) == 1 and each[1 - idle[0]]["generation_tokens",] == len(output.token_ids) == 12


def test_a_question_that_ctrl_c_ends_is_answered_to_nobody(pair, monkeypatch):
    before = counted(pair)
    pid, answers, pressed = pair.llm_engine._fleet._workers[0].process.pid, fleet.Fleet._answers, []

    def press_once(*asked):
        if not pressed:
            pressed.append(os.kill(os.getpid(), signal.SIGINT))
        return answers(*asked)

    monkeypatch.setattr(fleet.Fleet, "_answers", press_once)
    freeze(pid)
    try:
        with pytest.raises(KeyboardInterrupt):
            pair.get_metrics()
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    pair.generate(PROMPTS, GREEDY, use_tqdm=False)
    for _ in range(2):
        assert grown(before, counted(pair))["generation_tokens",] == 12 * len(PROMPTS)


def test_a_new_engine_has_counted_nothing_and_says_so(open_replicas):
    """And one that is never asked is sent no question."""
    sent = []
    with open_replicas("qwen3", 2, num_gpu_blocks_override=9) as llm, pytest.MonkeyPatch.context() as patch:
        send = Line.send
        patch.setattr(Line, "send", lambda line, text, *arrays: (sent.append([*text]), send(line, text, *arrays)))
        llm.generate([[1], [2]], GREEDY, use_tqdm=False)
        assert sent == [["add"], ["add"]]
        figures = llm.get_metrics()
        assert sent == [["add"], ["add"], ["ask"], ["ask"]]
    (info,) = (figure for figure in figures if figure.name == "nanovllm:cache_config_info")
    assert info.value == 1 and info.labels["num_gpu_blocks"] == "18" and info.labels["engine"] == "all"
    assert {figure.name.removeprefix("nanovllm:") for figure in figures} == set(METRICS) - {"device_memory_bytes"}
    with pytest.raises(EngineError, match="this LLM has been closed"):
        llm.get_metrics()


def test_a_scraper_reads_a_series_of_each(pair):
    text = exposition(pair, vllm_names=True)
    model = pair.config.model
    for place in range(2):
        drawn = counted(pair, place)["generation_tokens",]
        assert f'vllm:generation_tokens_total{{engine="{place}",model_name="{model}"}} {float(drawn)}' in text
        assert f'nanovllm:num_steps_total{{engine="{place}"' in text
    assert 'engine="all"' not in text and text.count("# TYPE vllm:generation_tokens_total counter") == 1


def test_they_answer_in_the_middle_of_a_step(open_replicas, gate):
    """And whoever reads outputs reads them all: neither waits for the other."""
    with open_replicas("qwen3", 2) as llm:
        engine = llm.llm_engine
        for number in range(6):
            engine.add_request(str(number), [number] * 20, GREEDY)
        deadline = time.monotonic() + SECONDS
        while soon(lambda: now(llm, "num_requests_running")) < 2 and time.monotonic() < deadline:
            assert engine.step() == []
        running = soon(lambda: [now(llm, "num_requests_running", str(place)) for place in range(2)])
        assert min(running) >= 1 and soon(lambda: now(llm, "kv_cache_usage_perc")) >= 3 * sum(running) / 128
        assert soon(lambda: counted(llm))["num_steps",] == 0
        gate.touch()
        outputs = []
        while engine.has_unfinished_requests:
            outputs += engine.step()
            llm.get_metrics()
        assert sorted(output.request_id for output in outputs) == [str(number) for number in range(6)]
        assert counted(llm)["generation_tokens",] == 6 * 12 == sum(len(output.token_ids) for output in outputs)


def test_many_threads_ask_while_callers_are_served(open_replicas):
    llm = open_replicas("qwen3", 2)
    failures, stop = [], threading.Event()

    def ask(engine):
        before = {}
        try:
            while not stop.is_set():
                after = {figure: value for figure, value in counted(engine).items()}
                assert all(after[key] >= before.get(key, 0) for key in after if key[-1] != "sum"), "one went back"
                before = after
        except BaseException as error:  # noqa: BLE001  the test raises it
            failures.append(error)

    async def run():
        async with AsyncLLM(llm) as engine:
            threads = [threading.Thread(target=ask, args=(engine,)) for _ in range(3)]
            for thread in threads:
                thread.start()

            async def one(number):
                prompt = {"prompt_token_ids": [number, 1]}
                return [output async for output in engine.generate(prompt, LONG)][-1].token_ids

            outputs = await asyncio.gather(*map(one, range(8)))
            stop.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            return outputs, counted(engine)["generation_tokens",]

    outputs, drawn = asyncio.run(asyncio.wait_for(run(), 6 * SECONDS))
    assert failures == [] and drawn == sum(map(len, outputs)) == 8 * 200


def test_switched_off_nothing_is_counted_anywhere(open_replicas, plant):
    metrics = "__import__('nanovllm.metrics', fromlist=['Metrics']).Metrics"
    plant(metrics, "on_arrival", 0, "raise ValueError('it counts')")
    with open_replicas("qwen3", 2, disable_log_stats=True) as llm:
        assert len(llm.generate([[1]], GREEDY, use_tqdm=False)[0].token_ids) == 12
        with pytest.raises(ConfigError, match="without disable_log_stats"):
            llm.get_metrics()


# --- when something fails ---


def test_what_cannot_be_said_fails_alone(open_replicas, plant, capfd):
    plant("__import__('nanovllm.metrics', fromlist=['Metrics']).Metrics", "tell", 1, "raise ValueError('planted')")
    with open_replicas("qwen3", 2) as llm:
        llm.get_metrics()
        with pytest.raises(EngineError, match=r"replica 0 could not say what it has counted: ValueError: planted"):
            llm.get_metrics()
        assert len(llm.generate([[1]], GREEDY, use_tqdm=False)[0].token_ids) == 12
    assert "what has been counted cannot be said" in capfd.readouterr().err


def test_asking_a_replica_that_was_killed(open_replicas, traces):
    llm = open_replicas("qwen3", 2)
    os.kill(llm.llm_engine._fleet._workers[1].process.pid, signal.SIGKILL)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(EngineError, match=r"the engine is lost: replica 1 died \(status -9\). Make a new one"):
            llm.get_metrics()
    assert time.monotonic() - started < SECONDS
    with pytest.raises(EngineError, match="the engine is lost"):
        llm.generate([[1]], GREEDY, use_tqdm=False)
    llm.close()
    traces()


def test_asking_a_replica_that_is_frozen_ends_and_so_do_its_requests(open_replicas, traces, monkeypatch):
    monkeypatch.setattr(guard, "PATIENCE", 1.0)
    llm = open_replicas("qwen3", 2)
    engine = llm.llm_engine
    freeze(engine._fleet._workers[0].process.pid)
    engine.add_request(None, [1, 2], GREEDY)
    with pytest.raises(EngineError, match="replica 0 has not answered for 1 s"):
        llm.get_metrics()
    with pytest.raises(EngineError, match="replica 0 has not answered for 1 s") as error:
        for _ in range(1000):
            engine.step()
    assert [output.outputs[0].finish_reason for output in error.value.outputs] == ["error"]
    llm.close()
    traces()


def test_an_engine_that_is_closed_lets_go_who_asks(open_replicas, traces, monkeypatch):
    """Another thread waits for an answer that does not come."""
    monkeypatch.setattr(fleet, "END_SECONDS", 0.2)
    llm = open_replicas("qwen3", 2)
    asked, failures = threading.Event(), []
    answers = fleet.Fleet._answers
    monkeypatch.setattr(fleet.Fleet, "_answers", lambda *args: (asked.set(), answers(*args))[1])
    for worker in llm.llm_engine._fleet._workers:
        freeze(worker.process.pid)

    def ask():
        try:
            llm.get_metrics()
        except EngineError as error:
            failures.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(SECONDS)
    llm.close()
    thread.join(SECONDS)
    assert failures == ["the engine is lost: it was closed. Make a new one."]
    del thread
    traces()


def test_a_question_that_is_none_ends_the_replica(open_replicas, traces):
    llm = open_replicas("qwen3", 2)
    llm.llm_engine._fleet._questions[0].send({"nonsense": 1})
    for _ in range(2):
        with pytest.raises(EngineError, match="the engine is lost: replica 0 failed with KeyError: 'ask'"):
            llm.get_metrics()
    llm.close()
    traces()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_an_answer_that_is_none_loses_the_engine(open_replicas, traces, busy):
    llm = open_replicas("qwen3", 2)
    llm.get_metrics()
    if busy:
        llm.llm_engine.add_request(None, [1], LONG)
    next(llm.llm_engine._fleet._questions[1]._read)  # so the next answer has another number than is due
    with pytest.raises(EngineError, match="a replica's message is number 1, not 2"):
        llm.get_metrics()
    if busy:
        with pytest.raises(EngineError, match="^the engine is lost: a replica's message is number 1, not 2") as error:
            llm.llm_engine.step()
        assert [output.outputs[0].finish_reason for output in error.value.outputs] == ["error"]
        traces()  # before it is closed
    with pytest.raises(EngineError, match="^the engine is lost: a replica's message is number 1, not 2"):
        llm.generate([[1]], GREEDY, use_tqdm=False)
    llm.close()
    traces()


def test_a_signal_may_close_the_engine_that_the_same_thread_asks(open_replicas, traces, monkeypatch):
    llm, answers = open_replicas("qwen3", 2), fleet.Fleet._answers
    monkeypatch.setattr(fleet.Fleet, "_answers", lambda *asked: (llm.close(), answers(*asked))[1])
    with pytest.raises(EngineError, match="the engine is lost: it was closed"):
        soon(llm.get_metrics)
    traces()

"""What is counted is what happens: against an observer that looks at each request, in random workloads and by hand."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm import llm as facade
from nanovllm.errors import ConfigError, EngineError
from nanovllm.metrics import Counter, Gauge, Histogram, Metrics
from nanovllm.metrics.figures import BOUNDS, METRICS, Buckets
from nanovllm.observer import StepTimes


def named(figures):
    """{bare name, or (bare name, label): metric}"""
    found = {}
    for figure in figures:
        own = [value for name, value in figure.labels.items() if name in ("kind", "part", "finished_reason")]
        name = figure.name.removeprefix("nanovllm:")
        assert (name, *own) not in found
        found[(name, *own) if own else name] = figure
    return found


def histograms(figures):
    return {name: (each.count, each.sum) for name, each in named(figures).items() if isinstance(each, Histogram)}


class Naive:
    """Counts request by request what ``Metrics`` counts by step."""

    def __init__(self):
        self.seen = {name: [] for name, about in METRICS.items() if about.kind is Histogram}
        self.drawn, self.last, self.ended = {}, {}, []
        self.prompt = self.cached = self.steps = 0
        self.parts = [0.0] * 4

    def on_arrival(self, request):
        self.drawn[request] = 0

    def on_decision(self, output):
        pass

    def on_failure(self, output, error):
        pass

    def on_step(self, output, times):
        self.steps += 1
        for place, (start, stop) in enumerate(
            [(times.began, times.decided), (times.decided, times.submitted), (times.awaited, times.computed),
             (times.computed, times.settled)]
        ):  # fmt: skip
            self.parts[place] += stop - start
        self.seen["step_requests"].append(len(output.spans))
        self.seen["iteration_tokens_total"].append(sum(span.stop - span.start for span in output.spans))
        for span in output.spans:
            request = span.request
            if request.num_output_tokens == self.drawn[request]:
                continue
            self.drawn[request] += 1
            assert self.drawn[request] == request.num_output_tokens
            if self.drawn[request] == 1:
                self.seen["time_to_first_token_seconds"].append(times.computed - request.metrics.queued_ts)
                self.prompt += len(request.prompt_token_ids)
                self.cached += request.num_cached_tokens
            else:
                self.seen["inter_token_latency_seconds"].append(times.computed - self.last[request])
            self.last[request] = times.computed

    def on_end(self, request):
        self.ended.append(request.finish_reason)
        times, number = request.metrics, request.num_output_tokens
        if request.finish_reason not in ("stop", "length") or not number:
            return
        for name, value in {
            "e2e_request_latency_seconds": times.last_token_ts - times.queued_ts,
            "request_queue_time_seconds": times.scheduled_ts - times.queued_ts,
            "request_inference_time_seconds": times.last_token_ts - times.scheduled_ts,
            "request_prefill_time_seconds": times.first_token_ts - times.scheduled_ts,
            "request_decode_time_seconds": times.last_token_ts - times.first_token_ts,
            "request_prompt_tokens": len(request.prompt_token_ids),
            "request_generation_tokens": number,
            "request_params_n": request.params.n,
            "request_params_max_tokens": request.max_tokens,
        }.items():
            self.seen[name].append(value)
        if number > 1:
            mean = (times.last_token_ts - times.first_token_ts) / (number - 1)
            self.seen["request_time_per_output_token_seconds"].append(mean)

    def close(self):
        pass

    def compare(self, figures):
        found = named(figures)
        for name, values in self.seen.items():
            assert found[name].count == len(values), name
            assert found[name].sum == pytest.approx(sum(values), abs=1e-9), name
            for bound, number in found[name].buckets.items():
                # sums of floats may round another way where a value meets a bound, and only there
                assert sum(value <= float(bound) * (1 - 1e-9) for value in values) <= number, name
                assert number <= sum(value <= float(bound) * (1 + 1e-9) for value in values), name
        assert found["generation_tokens"].value == sum(self.drawn.values())
        assert (found["prompt_tokens"].value, found["prompt_tokens_cached"].value) == (self.prompt, self.cached)
        assert found["num_steps"].value == self.steps
        for part, seconds in zip(("decide", "submit", "wait", "settle"), self.parts, strict=True):
            assert found["step_seconds", part].value == pytest.approx(seconds, abs=1e-9)
        for reason in ("stop", "length", "abort", "error"):
            assert found["request_success", reason].value == self.ended.count(reason)


@pytest.fixture
def run_of(schedules, facts, config):
    """Serve a random workload, and compare the two observers, and each reading with the one before."""

    def serve(seed):
        naive = Naive()

        class Run(schedules.Run):
            def __init__(self, work):
                super().__init__(work)
                self.metrics = Metrics(self.scheduler, config(), facts())
                self.engine.observers += [self.metrics, naive]
                self.before = {}

            def check_books(self):
                super().check_books()
                now = {key: each.value for key, each in named(self.metrics.read()).items() if isinstance(each, Counter)}
                assert all(value >= self.before.get(key, 0) for key, value in now.items()), "a counter went back"
                self.before = now

        run = Run(schedules.draw(seed))
        record = run.serve()
        naive.compare(run.metrics.read())
        assert not run.metrics._alive and not run.metrics._paused and not run.metrics._drew, "requests are kept"
        found = named(run.metrics.read())
        assert found["num_preemptions"].value == record.counts["preemptions"]
        assert found["num_evictions"].value == record.counts["evictions"]
        assert found["prefix_cache_queries"].value == (naive.prompt if run.work.caching else 0)
        assert len(run.engine.observers) == 2, "nobody was dismissed"
        return naive, record

    return serve


@pytest.mark.parametrize("start", range(0, 100, 10))
def test_counting_by_step_is_counting_by_request(run_of, start):
    for seed in range(start, start + 10):
        run_of(seed)


def test_the_workloads_do_what_they_are_for(run_of):
    preempted = cached = interrupted = 0
    reasons = set()
    for seed in range(40):
        naive, record = run_of(seed)
        preempted += record.counts["preemptions"]
        interrupted += record.counts["interrupts"] + record.counts["interrupted waits"]
        cached += naive.cached
        reasons |= set(naive.ended)
    assert preempted > 10 and cached > 20 and interrupted > 5 and reasons == {"stop", "length", "abort"}


def test_failed_steps_and_tokens_that_are_none(schedules, facts, config):
    bench = schedules.Bench(20)
    metrics = Metrics(bench.scheduler, config(), facts())
    bench.engine.observers = [metrics]
    bench.add("a", [1], max_tokens=9)
    bench.step()
    bench.runner.fail_with = schedules.Broken()
    with pytest.raises(EngineError):
        bench.step()
    submit = bench.runner.submit
    bench.runner.submit = lambda output: submit(output) and (lambda: [schedules.Sampled(-1)])
    bench.add("nan", [2], max_tokens=9)
    bench.step()
    found = named(metrics.read())
    assert found["request_success", "error"].value == 2 and found["generation_tokens"].value == 1
    assert found["e2e_request_latency_seconds"].count == 0 and found["num_steps"].value == 2
    assert not metrics._alive


def test_a_reader_in_the_middle_of_an_end_sees_no_counter_go_back(schedules, facts, config):
    """Another thread may ask when the request is gone from one sum and not yet in the other."""
    bench = schedules.Bench(20)
    metrics = Metrics(bench.scheduler, config(), facts())
    bench.engine.observers = [metrics]
    request = bench.add("a", [1], max_tokens=9)
    bench.step()
    bench.step()
    assert named(metrics.read())["generation_tokens"].value == 2
    del metrics._alive[request]
    assert named(metrics.read())["generation_tokens"].value == 2


# --- by hand ----------------------------------------------------------------------------------------------------


def test_queues_and_blocks_as_they_are_when_somebody_asks(schedules, facts, config):
    bench = schedules.Bench(8, seqs=2)
    metrics = Metrics(bench.scheduler, config(), facts())
    bench.engine.observers = [metrics]
    for name in "abc":
        bench.add(name, [1, 2], max_tokens=4)
    bench.engine.add_request("n", [1] * 9, SamplingParams(n=3, max_tokens=1))
    bench.step()
    found = named(metrics.read())
    values = [found[name].value for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    assert values == [2, 4, 2 / 8]
    assert found["step_requests"].buckets["8.0"] == 1 and found["step_requests"].buckets["1.0"] == 0
    assert isinstance(found["kv_cache_usage_perc"], Gauge)


def test_the_speed_is_that_of_the_last_seconds(schedules, facts, config, monkeypatch):
    bench = schedules.Bench(20)
    metrics = Metrics(bench.scheduler, config(), facts())
    bench.add("a", [1] * 6, max_tokens=100)
    (request,) = bench.scheduler.waiting
    metrics.on_arrival(request)
    metrics._began, clock = 100.0, 100.0

    def at(moment, tokens):
        nonlocal clock
        for _ in range(tokens):
            clock = moment
            output = bench.scheduler.schedule()
            if request.num_output_tokens == 0:
                request.metrics.first_token_ts = moment
            bench.scheduler.update(output, [schedules.Sampled(0)])
            metrics.on_step(output, StepTimes(*[moment] * 6))

    def speed(now):
        monkeypatch.setattr("nanovllm.metrics.counting.time.perf_counter", lambda: now)
        found = named(metrics.read())
        return found["tokens_per_second", "prompt"].value, found["tokens_per_second", "generation"].value

    at(100.5, 4)
    at(101.5, 4)
    assert speed(102.0) == (6 / 2, 8 / 2), "since the engine was built"
    at(109.5, 12)
    assert speed(109.75) == (6 / 9.75, 20 / 9.75)
    assert speed(111.0) == (0.0, 12 / 9), "the window begins at a whole second"
    assert speed(200.0) == (0.0, 0.0)


def test_buckets_count_what_is_at_most_their_bound():
    buckets = Buckets((1, 2.5))
    for value, times in ((1, 1), (1.5, 3), (2.5, 1), (9, 2)):
        buckets.add(value, times)
    assert buckets.read("h", {}) == Histogram("h", {}, 7, 1 + 4.5 + 2.5 + 18, {"1.0": 1, "2.5": 5, "+Inf": 7})


def test_bounds_grow_and_every_histogram_has_some():
    assert all(list(bounds) == sorted(set(bounds)) for bounds in BOUNDS.values())
    assert {about.bounds for about in METRICS.values() if about.kind is Histogram} == set(BOUNDS)


# --- through the front door -------------------------------------------------------------------------------------


def test_an_llm_counts_from_the_start(open_llm, folder):
    llm = open_llm()
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
    prompts = [list(range(20)), list(range(20)), [7]]
    outputs = llm.generate(prompts[:1], params, use_tqdm=False) + llm.generate(prompts, params, use_tqdm=False)
    found = named(llm.get_metrics())
    assert found["generation_tokens"].value == sum(len(output.token_ids) for output in outputs) == 20
    assert found["prompt_tokens"].value == 61 == found["prefix_cache_queries"].value
    cached = sum(output.num_cached_tokens for output in outputs)
    assert found["prefix_cache_hits"].value == found["prompt_tokens_cached"].value == cached > 0
    assert found["request_success", "length"].value == 4 and found["num_requests_running"].value == 0
    queued = [output.metrics.first_token_latency for output in outputs]
    assert found["time_to_first_token_seconds"].sum == pytest.approx(sum(queued))
    assert found["num_steps"].value == 10 and found["step_seconds", "submit"].value > 0
    assert all(each.labels["model_name"] == folder and each.labels["engine"] == "0" for each in llm.get_metrics())
    assert {each.name.removeprefix("nanovllm:") for each in llm.get_metrics()} == set(METRICS) - {"device_memory_bytes"}
    info = found["cache_config_info"].labels
    assert (info["block_size"], info["num_gpu_blocks"], info["cache_dtype"]) == ("8", "32", "float32")


def test_vllms_names_are_those_that_its_dashboards_ask_for():
    asked = """
        num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits
        prompt_tokens generation_tokens prompt_tokens_cached num_preemptions request_success
        time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
        e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds
        request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens
        request_params_n request_params_max_tokens iteration_tokens_total cache_config_info
    """
    assert {name for name, about in METRICS.items() if about.vllm} == set(asked.split())


def test_the_page_lists_what_there_is():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (gauge|counter|histogram) \| [^|]+ \| [^|]+ \| (yes|no) \|$", page, re.MULTILINE)
    known = [(name, about.kind.__name__.lower(), "yes" if about.vllm else "no") for name, about in METRICS.items()]
    assert rows == known
    for name in re.findall(r"nanovllm:(\w+)", page):
        bare = re.sub("_(total|bucket|sum|count)$", "", name)
        assert {name, bare} & set(METRICS), name


def test_switched_off_nothing_is_counted_and_asking_says_so(open_llm):
    llm = open_llm(disable_log_stats=True)
    assert llm.llm_engine.observers == []
    llm.generate([[1]], SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ConfigError, match="without disable_log_stats") as caught:
        llm.get_metrics()
    assert caught.value.parameter == "disable_log_stats" and caught.value.value is True


def test_without_the_room_the_engine_runs_and_asking_says_so(open_llm, monkeypatch):
    monkeypatch.setattr(facade, "METRICS", "nanovllm.nowhere:attach")
    llm = open_llm()
    assert len(llm.generate([[1]], SamplingParams(max_tokens=2), use_tqdm=False)[0].token_ids) == 2
    with pytest.raises(ConfigError, match="the folder nanovllm/metrics there"):
        llm.get_metrics()


def test_a_closed_llm_lets_its_observers_go(open_llm):
    llm = open_llm()
    metrics = llm.llm_engine.observers[0]
    llm.llm_engine.add_request("left", [1], SamplingParams())
    assert metrics._alive
    llm.close()
    assert not metrics._alive
    with pytest.raises(EngineError, match="closed"):
        llm.get_metrics()


def test_an_async_llm_says_it_while_it_works(open_llm):
    llm = open_llm()

    async def ask():
        seen = []
        async with AsyncLLM(llm) as engine:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            async for _ in engine.generate({"prompt_token_ids": [1, 2]}, params):
                seen.append(named(engine.get_metrics())["generation_tokens"].value)
        return seen

    seen = asyncio.run(ask())
    assert seen == sorted(seen) and seen[0] > 0 and seen[-1] == 20


# --- what it costs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "most"), [(1, 450), (256, 5000)])
def test_the_operations_of_a_step_are_bounded(schedules, facts, config, batch, most):
    """300 and 2,600 on Python 3.11: a list of who drew, and for all of them together a sum or two."""
    bench = schedules.Bench(batch * 4, seqs=batch, budget=2000, enable_prefix_caching=False)
    seen = []
    metrics = Metrics(bench.scheduler, config(), facts())

    class Last(Naive):
        def on_step(self, output, times):
            seen[:] = [output, times]

    bench.engine.observers = [metrics, Last()]
    for number in range(batch):
        bench.add(str(number), [1], max_tokens=9)
    for _ in range(4):
        bench.engine.step()
    counted = 0

    def watch(frame, event, _):
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        metrics.on_decision(seen[0])
        metrics.on_step(*seen)
    finally:
        sys.settrace(before)
    assert 50 < counted < most
    assert len(metrics._drew) == batch

"""What replicas have counted, added up, and on its way from one process to another."""

import json
from collections import Counter as Tally
from dataclasses import replace

import pytest

from nanovllm.errors import EngineError
from nanovllm.metrics import Counter, Gauge, Histogram, Metrics, Together
from nanovllm.metrics.exchange import hear, tell
from nanovllm.metrics.figures import METRICS
from nanovllm.metrics.replicas import in_order, total


@pytest.fixture
def counted(schedules, facts, config):
    """Serve random workloads, one of each seed; return what an engine each has counted."""

    def serve(*seeds):
        found = []
        for replica, seed in enumerate(seeds):
            run = schedules.Run(schedules.draw(seed))
            metrics = Metrics(run.scheduler, config(), facts(), replica)
            run.engine.observers.append(metrics)
            run.serve()
            found.append(metrics)
        return found

    return serve


def test_figures_arrive_as_they_were_told(counted):
    for metrics in counted(*range(20)):
        figures = metrics.read()
        assert without_speed(hear(json.loads(json.dumps(metrics.tell())))) == without_speed(figures)
        assert hear(tell(figures)) == figures


def without_speed(figures):
    return [figure for figure in figures if not figure.name.endswith("tokens_per_second")]


@pytest.mark.parametrize("start", range(0, 40, 4))
def test_the_total_is_the_sum_of_every_value_and_every_bucket(counted, start):
    replicas = [without_speed(metrics.read()) for metrics in counted(*range(start, start + 4))]
    sums, sizes = Tally(), []
    for figures in replicas:
        for figure in figures:
            labels = {name: text for name, text in figure.labels.items() if name != "engine"}
            if figure.name.endswith("cache_config_info"):
                sizes.append(int(figure.labels["num_gpu_blocks"]))
            for part, value in values(figure).items():
                sums[(figure.name, *sorted(labels.items()), part)] += value
    found = total(replicas)
    assert {figure.labels["engine"] for figure in found} == {"all"} and len(found) == len(replicas[0])
    assert [figure.name for figure in found] == [figure.name for figure in replicas[0]]
    for figure in found:
        labels = {name: text for name, text in figure.labels.items() if name != "engine"}
        if figure.name.endswith("cache_config_info"):
            assert figure.value == 1 and figure.labels["num_gpu_blocks"] == str(sum(sizes))
        elif not figure.name.endswith("kv_cache_usage_perc"):
            for part, value in values(figure).items():
                assert value == pytest.approx(sums[(figure.name, *sorted(labels.items()), part)], abs=1e-9), figure


def values(figure):
    if isinstance(figure, Histogram):
        return {"count": figure.count, "sum": figure.sum, **figure.buckets}
    return {"value": figure.value}


def test_the_usage_is_used_blocks_over_all_blocks(schedules, facts, config):
    """Of caches of different sizes; neither a sum nor a mean of shares."""
    replicas = []
    for num_blocks, prompts in ((3, 1), (30, 4), (7, 0)):
        bench = schedules.Bench(num_blocks)
        metrics = Metrics(bench.scheduler, config(), facts())
        for number in range(prompts):
            bench.add(str(number), [number] * 5, max_tokens=2)
        if prompts:
            bench.step()
        assert bench.scheduler.blocks.num_held == 2 * prompts
        replicas.append(hear(metrics.tell()))
    found = {figure.name: figure for figure in total(replicas)}
    assert found["nanovllm:kv_cache_usage_perc"].value == (2 + 8) / 40
    assert found["nanovllm:cache_config_info"].labels["num_gpu_blocks"] == "40"
    assert found["nanovllm:num_requests_running"].value == 5


def test_a_label_that_one_replica_alone_has(counted):
    """Devices may differ: what one says and the others do not is the sum."""
    replicas = [metrics.read() for metrics in counted(1, 2)]
    more = Gauge("nanovllm:device_memory_bytes", {"model_name": "m", "engine": "1", "kind": "free"}, 7)
    replicas[1].append(more)
    found = total(replicas)
    assert [figure for figure in found if figure.name == more.name] == [
        replace(more, labels=more.labels | {"engine": "all"})
    ]
    names = [figure.name.removeprefix("nanovllm:") for figure in found]
    assert sorted(names, key=list(METRICS).index) == names


def test_each_replica_has_its_label_and_names_stand_together(counted):
    made = counted(1, 2, 3)
    found = Together(lambda: [metrics.tell() for metrics in made]).read(per_replica=True)
    order = [(list(METRICS).index(figure.name.removeprefix("nanovllm:")), figure.labels["engine"]) for figure in found]
    assert order == sorted(order) and {engine for _, engine in order} == {"0", "1", "2"}
    assert in_order(reversed(found)) != found and len(found) == 3 * len(made[0].read())


GOOD = ["num_steps", {"engine": "0"}, 3]
BAD = [
    "text", 7, [7], [[]], [GOOD[:2]], [[*GOOD, 1]], [["no_such_name", {}, 1]], [["num_steps", {}, -1]],
    [["num_steps", {}, "3"]], [["num_steps", {}, [1, 2]]], [["num_steps", {}, []]], [["num_steps", [], 1]],
    [["num_steps", {"engine": 0}, 1]], [["step_requests", {}, 3]], [["step_requests", {}, [1.0, 2, 3]]],
    [["step_requests", {}, [1.0, *range(14, 0, -1)]]], [["num_steps", {}, None]],
]  # fmt: skip


@pytest.mark.parametrize("told", BAD, ids=str)
def test_what_is_no_figure_is_refused(told):
    assert hear([GOOD]) == [Counter("nanovllm:num_steps", {"engine": "0"}, 3)]
    assert hear([["step_requests", {}, [1.0, *range(14)]]])[0].count == 13
    with pytest.raises(EngineError, match="a replica's metrics cannot be read"):
        hear(told)

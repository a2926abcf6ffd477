"""Warnings: when they come, how often, and that they name the options with their values."""

import logging

import pytest
import torch

from nanovllm.metrics import advice
from nanovllm.metrics.advice import Advice, slow_paths


@pytest.fixture
def watched(schedules, config, facts, caplog):
    """A bench with advice, over a clock that the test sets."""
    caplog.set_level(logging.WARNING, "nanovllm")

    def make(num_blocks, *, options=None, known=None, **bench):
        made = schedules.Bench(num_blocks, **bench)
        made.now = 1000.0
        made.advice = Advice(made.scheduler, config(**options or {}), facts(**known or {}), clock=lambda: made.now)

        class Observer(Nobody):
            def on_decision(self, output):
                made.advice.look(output)

        made.engine.observers = [Observer()]
        return made

    return make


class Nobody:
    def on_arrival(self, request):
        request.metrics.queued_ts = 1000.0  # on the test's clock

    def on_step(self, output, times): ...
    def on_failure(self, output, error): ...
    def on_end(self, request): ...
    def close(self): ...


def crowd(bench, rounds=6):
    """Pairs that need more blocks than there are."""
    for number in range(rounds):
        bench.add(f"{number}a", [1] * 4, max_tokens=7)
        bench.add(f"{number}b", [2] * 4, max_tokens=7)
        bench.finish()


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == advice.__name__]


def test_many_preemptions_are_said_once_in_a_while_with_the_levers(watched, caplog):
    bench = watched(4, options={"max_num_seqs": 99})
    crowd(bench, 3)
    assert 0 < bench.scheduler.num_preemptions < advice.MANY_PREEMPTIONS and lines(caplog) == []
    crowd(bench, 20)
    (line,) = lines(caplog)
    assert f"full {advice.MANY_PREEMPTIONS} times" in line and "4 blocks of 4 tokens" in line
    assert "since the last" not in line and "None" not in line
    for lever in ("give more with kv_cache_memory_bytes", "max_model_len=128", "max_num_seqs=99"):
        assert lever in line
    assert "gpu_memory_utilization" not in line and "fp8" not in line, "on a CPU these change nothing"
    bench.now += advice.QUIET_SECONDS - 1
    crowd(bench, 20)
    assert len(lines(caplog)) == 1
    before = bench.scheduler.num_preemptions
    bench.now += 1
    crowd(bench, 1)
    _, second = lines(caplog)
    assert f"full {before + 1 - advice.MANY_PREEMPTIONS} times since the last such line" in second


@pytest.mark.parametrize(
    ("options", "known", "levers"),
    [
        ({}, {"device": "cuda"}, ["gpu_memory_utilization=0.9", "kv_cache_dtype='fp8'"]),
        ({}, {"device": "cuda", "cache_dtype": torch.float8_e4m3fn}, ["gpu_memory_utilization=0.9"]),
        ({"kv_cache_memory_bytes": 10**9}, {"device": "cuda"}, ["kv_cache_memory_bytes=1000000000", "fp8"]),
        ({"num_gpu_blocks_override": 4}, {}, ["num_gpu_blocks_override=4"]),
    ],
)
def test_the_levers_are_those_that_would_help_here(watched, caplog, options, known, levers):
    crowd(watched(4, options=options, known=known), 20)
    (line,) = lines(caplog)
    assert all(lever in line for lever in levers)
    named = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "fp8")
    assert [name for name in named if name in line] == [n for n in named if any(n in lever for lever in levers)]


@pytest.mark.parametrize(
    ("bench", "options", "known", "says"),
    [
        ({"num_blocks": 20, "seqs": 2}, {"max_num_seqs": 2}, {}, "max_num_seqs=2 is reached, with 10% of the cache"),
        ({"num_blocks": 20, "budget": 2}, {}, {"max_num_batched_tokens": 2}, "max_num_batched_tokens=2 is reached"),
        ({"num_blocks": 3}, {}, {}, "no blocks are left for it, with 2 requests running. It has 3 blocks of 4 tokens"),
    ],
)
def test_a_long_wait_says_what_bounds(watched, caplog, bench, options, known, says):
    made = watched(**bench, options=options, known=known)
    for name in "abc":
        made.add(name, [1], max_tokens=3)
    made.now += advice.QUEUE_SECONDS
    made.step()
    assert lines(caplog) == [], "not yet"
    made.now += 1
    made.step()
    (line,) = lines(caplog)
    assert f"the first of 1 requests in the queue has waited 31 s: {says}" in line
    made.add("d", [1], max_tokens=3)
    made.now += 100
    made.finish()
    assert len(lines(caplog)) == 1


def test_a_budget_that_is_used_up(watched, caplog):
    made = watched(20, budget=8)
    made.add("long", [1] * 30, max_tokens=1)
    made.add("waits", [1], max_tokens=1)
    made.now += 31
    made.step()
    (line,) = lines(caplog)
    assert "each step computes its 8 tokens and no more. Raise max_num_batched_tokens=64" in line


def test_a_pace_that_keeps_requests_out(watched, caplog):
    made = watched(20, options={"target_itl_ms": 5.0})
    made.scheduler.max_running = 1  # as ``nanovllm.pacing`` does
    for name in "ab":
        made.add(name, [1], max_tokens=3)
    made.now += 31
    made.step()
    (line,) = lines(caplog)
    assert "target_itl_ms=5.0 lets 1 run at once" in line


def test_nobody_waits_for_who_is_preempted(watched, caplog):
    """It came long ago, and has been served since."""
    made = watched(4)
    made.add("a", [1] * 4, max_tokens=7)
    made.add("b", [2] * 4, max_tokens=7)
    made.step()
    made.now += 500
    made.finish()
    assert made.scheduler.num_preemptions and lines(caplog) == []


def test_slow_paths_on_a_gpu_and_none_elsewhere(config, facts, caplog, schedules):
    assert slow_paths(config(), facts("cuda")) == []
    assert slow_paths(config(enforce_eager=True), facts(backend="sdpa", dtype=torch.float32)) == []
    eager, backend, dtype = slow_paths(config(enforce_eager=True), facts("cuda", backend="sdpa", dtype=torch.float32))
    assert "enforce_eager=True" in eager and "CUDA graphs" in eager
    assert "attention by sdpa" in backend and "attention_backend='auto'" in backend
    assert "float32" in dtype and "dtype='bfloat16'" in dtype
    with caplog.at_level(logging.WARNING, "nanovllm"):
        Advice(schedules.Bench(4).scheduler, config(enforce_eager=True), facts("cuda"))
    assert lines(caplog) == [eager]


def test_the_fast_backends_are_all_but_the_fallback():
    from nanovllm.ops.attention import BACKENDS

    assert {module.rpartition(".")[2] for module in BACKENDS.values()} - {*advice.FAST_BACKENDS} == {"sdpa"}

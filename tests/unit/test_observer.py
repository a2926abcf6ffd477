"""The port for whoever watches an engine: who is told what, when, in runs of every kind; and the block journal.

The engine is that of test_scheduler.py, over a runner that computes nothing.
"""

import logging
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from nanovllm.errors import EngineError
from nanovllm.sampling_params import SamplingParams


def sibling(name):
    """Load a test file that lies beside this one."""
    spec = spec_from_file_location(f"observer_{name}", Path(__file__).with_name(f"{name}.py"))
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCHEDULES = sibling("test_scheduler")
Bench, Broken = SCHEDULES.Bench, SCHEDULES.Broken


class Watcher:
    """Writes down what it is told, in plain values, and checks what must hold whenever something is told."""

    def __init__(self, engine):
        self.engine = engine
        self.told = []
        self.steps = []
        self.decided = []
        self.alive = set()
        engine.observers.append(self)

    def on_arrival(self, request):
        assert request not in self.alive and not request.is_finished
        assert request.metrics.queued_ts > 0 and request.metrics.arrival_time > 1e9
        self.alive.add(request)
        self.told.append(("arrival", request.request_id))

    def on_decision(self, output):
        self.decided.append(output)
        spans = [(span.request.request_id, span.start, span.stop) for span in output.spans]
        self.told.append(("decision", *spans))

    def on_step(self, output, times):
        assert any(output is each for each in self.decided), "settled, and never decided"
        assert times.began <= times.decided <= times.submitted <= times.awaited <= times.computed <= times.settled
        if self.steps:
            before_output, before = self.steps[-1]
            assert self.place(before_output) < self.place(output), "steps are settled in their order"
            assert before.began <= times.began and before.settled <= times.awaited
        self.steps.append((output, times))
        self.told.append(("step", *(span.request.request_id for span in output.spans)))

    def on_failure(self, output, error):
        assert any(output is each for each in self.decided) and isinstance(error, Exception)
        self.told.append(("failure", *(span.request.request_id for span in output.spans)))

    def on_end(self, request):
        assert request in self.alive, "it ends twice, or was never there"
        assert request.is_finished and request.finish_reason and not request.block_ids
        self.alive.discard(request)
        self.told.append(("end", request.request_id, request.finish_reason))

    def close(self):
        self.told.append(("close",))

    def place(self, output):
        return next(place for place, each in enumerate(self.decided) if each is output)


def watched(num_blocks=20, lookahead=0, **options):
    bench = Bench(num_blocks, **options)
    bench.runner.lookahead = lookahead
    return bench, Watcher(bench.engine)


# --- who is told what -------------------------------------------------------------------------------------------


def test_an_ordinary_run():
    bench, watcher = watched()
    bench.add("a", [1] * 5, max_tokens=2)
    bench.add("b", [2], max_tokens=1)
    bench.finish()
    bench.engine.close()
    assert watcher.told == [
        ("arrival", "a"), ("arrival", "b"),
        ("decision", ("a", 0, 5), ("b", 0, 1)), ("step", "a", "b"), ("end", "b", "length"),
        ("decision", ("a", 5, 6)), ("step", "a"), ("end", "a", "length"),
        ("close",),
    ]  # fmt: skip
    assert bench.engine.observers == []


def test_where_steps_overlap_the_next_is_decided_before_the_last_is_settled():
    bench, watcher = watched(lookahead=1)
    bench.add("a", [1] * 5, max_tokens=3)
    bench.finish()
    assert watcher.told == [
        ("arrival", "a"), ("decision", ("a", 0, 5)), ("decision", ("a", 5, 6)), ("step", "a"),
        ("decision", ("a", 6, 7)), ("step", "a"), ("decision",), ("step", "a"), ("end", "a", "length"),
    ]  # fmt: skip
    (_, first), (_, second), _ = watcher.steps
    assert first.submitted <= second.began <= second.submitted <= first.awaited


def test_a_step_that_was_decided_before_an_end_was_known_is_still_told():
    bench, watcher = watched(lookahead=1, eos={SCHEDULES.next_token([1])})
    bench.add("a", [1], max_tokens=9)
    bench.add("b", [2, 2, 2], max_tokens=3)
    bench.finish()
    assert ("end", "a", "stop") in watcher.told
    assert watcher.told[watcher.told.index(("end", "a", "stop")) + 1 :][:2] == [
        ("decision", ("b", 4, 5)), ("step", "a", "b"),
    ]  # fmt: skip


def test_a_preempted_run():
    bench, watcher = watched(4)
    for name in "01":
        bench.add(name, [int(name)] * 4, max_tokens=7)
    outputs = bench.finish()
    victims = [request.request_id for output in watcher.decided for request in output.preempted]
    assert victims and set(victims) == {"1"}
    assert [each for each in watcher.told if each[0] == "end"] == [("end", "0", "length"), ("end", "1", "length")]
    assert outputs["1"].metrics.num_preemptions == len(victims) == bench.scheduler.num_preemptions


def test_a_request_that_the_decision_ends():
    """It has outgrown the pool: there is no step, and its end is told behind the decision."""
    bench, watcher = watched(1)
    bench.add("grows", [1] * 4, max_tokens=9)
    bench.finish()
    assert watcher.told[-2:] == [("decision",), ("end", "grows", "length")]


def test_aborted_ones():
    bench, watcher = watched(seqs=1)
    for name in ("runs", "waits"):
        bench.add(name, [1], max_tokens=9)
    bench.step()
    bench.engine.abort("waits")
    bench.runner.meanwhile.append(lambda: bench.engine.abort("runs"))
    bench.step()
    assert bench.engine.abort("runs") is None
    assert watcher.told[4:] == [
        ("end", "waits", "abort"), ("decision", ("runs", 1, 2)), ("end", "runs", "abort"), ("step", "runs"),
    ]  # fmt: skip
    assert not watcher.alive


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_step_that_fails_is_never_told_as_a_step(lookahead):
    bench, watcher = watched(lookahead=lookahead, seqs=1)
    for name in ("fails", "next"):
        bench.add(name, [1], max_tokens=2)
    bench.runner.fail_with = Broken()
    with pytest.raises(EngineError):
        bench.step()
    assert watcher.told[2:] == [("decision", ("fails", 0, 1)), ("failure", "fails"), ("end", "fails", "error")]
    bench.finish()
    assert [each for each in watcher.told if each[0] == "step"] == [("step", "next")] * 2
    assert not watcher.alive


@pytest.mark.parametrize("where", ["submit", "wait"])
def test_after_ctrl_c_a_step_is_told_once(where):
    bench, watcher = watched()
    bench.add("a", [1], max_tokens=2)
    if where == "submit":
        bench.runner.fail_with = KeyboardInterrupt()
    bench.runner.interrupt_fetch = where == "wait"
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    assert [each[0] for each in watcher.told] == ["arrival", "decision"]
    bench.finish()
    assert [each for each in watcher.told if each[0] != "decision"] == [
        ("arrival", "a"), ("step", "a"), ("step", "a"), ("end", "a", "length"),
    ]  # fmt: skip
    again = [each for each in watcher.told if each == ("decision", ("a", 0, 1))]
    assert len(again) == (2 if where == "submit" else 1), "what was not computed is decided again"


def test_each_sample_is_told_of():
    bench, watcher = watched()
    bench.engine.add_request("n", [1] * 9, SamplingParams(n=3, max_tokens=2))
    bench.finish()
    assert [each[0] for each in watcher.told].count("arrival") == 3
    assert [each for each in watcher.told if each[0] == "end"] == [("end", "n", "length")] * 3


# --- an observer at fault ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["on_arrival", "on_decision", "on_step", "on_end", "close"])
def test_one_that_raises_is_dismissed_and_the_engine_goes_on(event, caplog):
    bench = Bench(20)

    class Faulty(Watcher):
        def __repr__(self):
            return "<Faulty>"

    faulty = Faulty(bench.engine)

    def fail(*_):
        raise Broken("a bug of its own")

    setattr(faulty, event, fail)
    other = Watcher(bench.engine)
    bench.add("a", [1], max_tokens=3)
    with caplog.at_level(logging.ERROR, "nanovllm"):
        outputs = bench.finish()
        bench.engine.close()
    assert outputs["a"].token_ids == SCHEDULES.alone([1], 3)
    (record,) = caplog.records
    assert record.getMessage() == f"<Faulty> failed in {event} and is dismissed; the engine goes on"
    assert record.exc_info[0] is Broken
    assert [each[0] for each in other.told].count("step") == 3 and other.told[-1] == ("close",)
    if event != "close":
        assert ("close",) not in faulty.told


# --- a request's own times --------------------------------------------------------------------------------------


def check_metrics(metrics):
    assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_times_of_a_request_are_those_of_its_steps(lookahead):
    bench, watcher = watched(lookahead=lookahead, budget=4, seqs=1)
    bench.add("a", [1] * 9, max_tokens=4)
    bench.add("b", [2], max_tokens=1)
    outputs = bench.finish()
    for name in "ab":
        check_metrics(outputs[name].metrics)
        own = [times for output, times in watcher.steps if any(s.request.request_id == name for s in output.spans)]
        drew = [
            times for output, times in watcher.steps
            if any(span.request.request_id == name and span.samples for span in output.spans)
        ]  # fmt: skip
        metrics = outputs[name].metrics
        assert (metrics.scheduled_ts, metrics.first_token_ts) == (own[0].decided, drew[0].computed)
        assert metrics.last_token_ts == drew[-1].computed
        assert metrics.num_generation_tokens == len(outputs[name].token_ids)
    assert outputs["b"].metrics.scheduled_ts >= outputs["a"].metrics.last_token_ts, "one at a time"


def test_a_stream_carries_the_times_as_they_become_known():
    bench, _ = watched()
    bench.add("s", [1] * 3, max_tokens=3, stream=True)
    pieces = []
    while bench.engine.has_unfinished_requests:
        bench.step()
        pieces.append(bench.outputs["s"].metrics)
    for metrics in pieces:
        check_metrics(metrics)
    assert [metrics.num_generation_tokens for metrics in pieces] == [1, 2, 3]
    assert len({metrics.first_token_ts for metrics in pieces}) == 1
    assert pieces[0].first_token_ts == pieces[0].last_token_ts < pieces[1].last_token_ts < pieces[2].last_token_ts


def test_what_never_ran_has_no_times():
    bench, _ = watched(seqs=1)
    bench.add("runs", [1], max_tokens=9)
    bench.add("waits", [1], max_tokens=9)
    bench.step()
    metrics = bench.engine.abort("waits").metrics
    assert metrics.queued_ts > 0 and metrics.scheduled_ts == metrics.first_token_ts == metrics.last_token_ts == 0.0


# --- random workloads -------------------------------------------------------------------------------------------


class Replay:
    """The block manager's state, from its journal alone."""

    def __init__(self, num_blocks):
        self.readers = [0] * num_blocks
        self.findable = set()
        self.cached = {}  # nobody reads them, in order of release
        self.evicted = None
        self.num_evictions = 0

    def apply(self, event, block):
        assert self.evicted in (None, block) and not (self.evicted == block and event not in ("forget", "take"))
        getattr(self, event)(block)

    def evict(self, block):
        assert block == next(iter(self.cached)), "the one that was unused for longest"
        self.evicted = block
        self.num_evictions += 1

    def take(self, block):
        assert self.readers[block] == 0 and block not in self.findable
        self.readers[block] = 1

    def hold(self, block):
        if self.readers[block] == 0:
            del self.cached[block]
        assert block in self.findable
        self.readers[block] += 1

    def free(self, block):
        self.readers[block] -= 1
        assert self.readers[block] >= 0
        if self.readers[block] == 0 and block in self.findable:
            self.cached[block] = None

    def know(self, block):
        assert self.readers[block] and block not in self.findable
        self.findable.add(block)

    def forget(self, block):
        self.findable.remove(block)
        self.cached.pop(block, None)
        self.evicted = None

    def check(self, blocks):
        assert self.readers == [block.ref_count for block in blocks._blocks]
        assert list(self.cached) == list(blocks._cached)
        assert self.findable == {block.index for block in blocks._blocks if block.digest is not None}
        assert self.num_evictions == blocks.num_evictions


class JournalledRun(SCHEDULES.Run):
    """Serves a workload, and compares what observer and journal say with the engine's own state at every step."""

    def __init__(self, work, **parts):
        super().__init__(work, **parts)
        self.blocks.journal = []
        self.replay = Replay(work.num_blocks)
        self.watcher = Watcher(self.engine)

    def check_books(self):
        super().check_books()
        for event, block in self.blocks.journal:
            self.replay.apply(event, block)
        self.blocks.journal.clear()
        self.replay.check(self.blocks)
        alive = {request for request in self.requests.values() if not request.is_finished}
        assert self.watcher.alive == alive


def check(seed, **parts):
    work = SCHEDULES.draw(seed)
    run = JournalledRun(work, **parts)
    record = run.serve()
    SCHEDULES.check_outputs(work, record)
    run.check_books()
    assert not run.watcher.alive
    ends = {each[1]: each[2] for each in run.watcher.told if each[0] == "end"}
    assert {name: reason for name, (_, reason) in record.outputs.items()} == ends
    preempted = sum(len(output.preempted) for output in run.watcher.decided)
    assert preempted == run.scheduler.num_preemptions
    for request in run.requests.values():
        if request.finish_reason in ("stop", "length") and request.num_output_tokens:
            check_metrics(request.current_metrics())
    return run


@pytest.mark.parametrize("seed", range(0, 300, 2))
def test_the_journal_and_the_observer_tell_all_that_happens(seed):
    check(seed)
    check(seed + 1)


def test_the_workloads_do_what_they_are_for():
    told, events = set(), 0
    for seed in range(60):
        run = check(seed)
        told |= {each[0] if each[0] != "end" else each[2] for each in run.watcher.told}
        events += run.replay.num_evictions
    assert told >= {"arrival", "decision", "step", "stop", "length", "abort"} and events > 20


def test_a_reset_and_a_pin_stand_in_the_journal():
    bench = Bench(8)
    bench.blocks.journal, replay = [], Replay(8)
    request = bench.add("a", [1] * 9, max_tokens=1)
    bench.finish()
    pins = bench.blocks.pin(request)
    bench.blocks.unpin(pins)
    assert bench.blocks.reset_prefix_cache()
    for event, block in bench.blocks.journal:
        replay.apply(event, block)
    replay.check(bench.blocks)
    assert [event for event, _ in bench.blocks.journal].count("hold") == len(pins) == 2
    assert [event for event, _ in bench.blocks.journal][-2:] == ["forget", "forget"] and not replay.cached


def test_without_a_journal_nothing_is_kept():
    bench = Bench(8)
    bench.add("a", [1] * 9, max_tokens=1)
    bench.finish()
    assert bench.blocks.journal is None

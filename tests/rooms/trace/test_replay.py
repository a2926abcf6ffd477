"""What a recording says of each step is what the books said: blocks, tables, LRU order, queues, tokens.

Random workloads over the shadow runner of the unit tests, on pools of a few blocks: preemption, eviction, chunks, aborts
before and during steps, several samples, pins, priorities, overlapped, failed and interrupted steps. Books are copied
when a decision is made, and compared with the replay when all is over.
"""

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError, RequestError
from nanovllm.observer import Observer
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Scheduler
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.recording import CODES
from nanovllm.trace.replay import Replay

SEEDS = range(300)


def shadow():
    """The shadow runner of the unit tests."""
    path = Path(__file__).parents[2] / "unit" / "test_scheduler.py"
    spec = importlib.util.spec_from_file_location("traced_workloads", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SHADOW = shadow()


class Books(Observer):
    """Copies the books after each decision that the recorder has written down."""

    def __init__(self, engine, recorder):
        self.scheduler, self.recorder = engine.scheduler, recorder
        self.places = {}
        self.copies = []

    def on_arrival(self, request):
        self.places[request] = len(self.places)

    def on_decision(self, output):
        if len(self.recorder._steps) > len(self.copies):
            self.copies.append(self.copy())

    def copy(self):
        blocks = self.scheduler.blocks
        return {
            "readers": [block.ref_count for block in blocks._blocks],
            "cached": list(blocks._cached),
            "findable": {block.index for block in blocks._blocks if block.digest is not None},
            "blank": len(blocks._blank),
            "tables": {self.places[r]: list(r.block_ids) for r in self.places if r.block_ids},
            "waiting": [self.places[request] for request in self.scheduler.waiting],
            "running": [self.places[request] for request in self.scheduler.running],
        }


def state(replay):
    return {
        "readers": list(replay.readers),
        "cached": list(replay.cached),
        "findable": set(replay.findable),
        "blank": replay.num_blank,
        "tables": {request: list(table) for request, table in replay.tables.items()},
        "waiting": replay.waiting,
        "running": replay.running,
    }


class Run:
    """One random workload, recorded."""

    def __init__(self, seed, **limits):
        self.dice = dice = random.Random(seed)
        self.num_blocks, self.block_size = dice.randint(3, 14), dice.choice([4, 8])
        self.blocks = BlockManager(self.num_blocks, self.block_size, enable_prefix_caching=dice.random() < 0.85)
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=dice.choice([1, 3, 8, 8]), max_num_batched_tokens=dice.choice([4, 7, 16, 64]),
            policy=dice.choice(["fcfs", "priority"]), patience=dice.choice([1, 3, 1000]),
        )  # fmt: skip
        self.runner = SHADOW.ShadowRunner(self.scheduler, seed % 2)
        ends = Limits(max_model_len=1000, vocab_size=SHADOW.VOCAB, eos_token_ids=frozenset({SHADOW.END}))
        self.engine = LLMEngine(self.scheduler, self.runner, ends)
        self.pins = []
        if seed % 3 == 0:  # a recording that begins with something in the cache, and something pinned
            self.engine.add_request(None, [1, 2, 3, 4, 5, 0, 1, 2, 3], SamplingParams(max_tokens=2))
            while self.engine.has_unfinished_requests:
                self.engine.step()
            self.pin([1, 2, 3, 4])
        self.recorder = Recorder(self.engine, **limits)
        self.books = Books(self.engine, self.recorder)
        self.engine.observers += [self.recorder, self.books]
        self.counts = Counter()

    def pin(self, prompt):
        request = SHADOW.Request(
            request_id="", prompt_token_ids=prompt, params=SamplingParams(), max_tokens=1, arrival=0
        )
        self.pins.append(self.blocks.pin(request))

    def serve(self):
        dice = self.dice
        stem = [dice.randrange(SHADOW.VOCAB) for _ in range(60)]
        left = dice.randint(2, 9)
        for step in range(3000):
            while left and (not self.engine.has_unfinished_requests or dice.random() < 0.4):
                left -= 1
                self.add(stem)
            if not self.engine.has_unfinished_requests:
                break
            alive = list(self.engine._requests)
            if dice.random() < 0.04:
                name = dice.choice(alive)
                if dice.random() < 0.5:
                    self.engine.abort(name)
                else:
                    self.runner.meanwhile.append(lambda name=name: self.engine.abort(name))
                self.counts["aborts"] += 1
            if dice.random() < 0.05 and len(self.pins) < 2 and self.num_blocks > 5:
                self.pin(stem[: 2 * self.block_size])
                self.counts["pins"] += bool(self.pins[-1])
            if self.pins and dice.random() < 0.1:
                self.blocks.unpin(self.pins.pop())
            self.step(dice.random())
            while self.runner.meanwhile:
                self.runner.meanwhile.pop()()
        else:
            raise AssertionError("the work does not end")
        while self.pins:
            self.blocks.unpin(self.pins.pop())
        if dice.random() < 0.5:
            assert self.blocks.reset_prefix_cache()
        self.counts["preemptions"] += self.scheduler.num_preemptions
        self.counts["evictions"] += self.blocks.num_evictions
        self.last = self.books.copy()
        self.engine.close()
        return self.recorder.recording()

    def add(self, stem):
        dice = self.dice
        shared = dice.choice([0, self.block_size, 2 * self.block_size, dice.randint(0, 20)])
        own = [dice.randrange(SHADOW.VOCAB) for _ in range(dice.choice([0, 1, 3, dice.randint(0, 20)]))]
        samples = dice.choice([1, 1, 1, 2, 3])
        params = SamplingParams(n=samples, max_tokens=dice.choice([1, 2, 8, dice.randint(1, 40)]), ignore_eos=True)
        if dice.random() < 0.3:
            params.ignore_eos = False
        try:
            self.engine.add_request(
                None, (stem[:shared] + own) or [1], params, priority=dice.randint(0, 2), stream=dice.random() < 0.3,
                cache_salt=dice.choice(["", "", "", "s"]),
            )  # fmt: skip
            self.counts["samples"] += samples > 1
        except RequestError:
            self.counts["refused"] += 1

    def step(self, luck):
        if luck < 0.03:
            self.runner.fail_with = SHADOW.Broken("planned")
        elif luck < 0.05:
            self.runner.fail_with = KeyboardInterrupt()
        elif luck < 0.07:
            self.runner.interrupt_fetch = True
        try:
            self.engine.step()
        except EngineError as error:
            assert isinstance(error.__cause__, SHADOW.Broken), error.__cause__
            self.counts["failures"] += 1
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        self.runner.fail_with, self.runner.interrupt_fetch = None, False


def check(seed):
    run = Run(seed)
    recording = run.serve()
    replay = Replay(recording)
    assert len(recording["steps"]) == len(run.books.copies)
    for number, books in enumerate(run.books.copies):
        assert replay.forward() and replay.step == number
        assert state(replay) == books, f"seed {seed}, step {number}"
    assert not replay.forward()
    replay.apply(recording["tail"])
    blocks = ("readers", "cached", "findable", "blank", "tables")
    assert {name: state(replay)[name] for name in blocks} == {name: run.last[name] for name in blocks}
    check_requests(run, recording)
    check_owners(recording)
    for step in recording["steps"]:
        assert step["t"] == sorted(step["t"])
        run.counts[f"wait {step['wait']}"] += 1
        run.counts["failed"] += "failed" in step
        run.counts["dropped"] += any(token == -2 for *_, token in step["spans"])
        run.counts["hits"] += 1 in step["blocks"][::3]
    return run.counts


def check_requests(run, recording):
    steps = recording["steps"]
    drawn = [{} for _ in recording["requests"]]
    for step in steps:
        for place, start, stop, token in step["spans"]:
            assert 0 <= start < stop
            if token >= 0:
                assert stop not in drawn[place], "one place, two tokens"
                drawn[place][stop] = token
    for request, place in run.books.places.items():
        row = recording["requests"][place]
        assert row["prompt"] == request.prompt_token_ids and row["rank"] == request.rank
        assert [drawn[place][at] for at in sorted(drawn[place])] == request.output_token_ids
        assert min(drawn[place], default=len(row["prompt"])) == len(row["prompt"])
        assert (row["finish"], row["cached"]) == (request.finish_reason, request.num_cached_tokens)
        assert row["arrived"] <= row["ended"] and row["gone_step"] >= row["before_step"]
        run.counts[f"end {row['finish']}"] += 1
        spans = [number for number, step in enumerate(steps) if any(span[0] == place for span in step["spans"])]
        if row["finish"] == "error":
            assert steps[row["end_step"]]["failed"] == "Broken: planned"
        elif row["finish"] == "stop":
            (last,) = [
                number for number in spans
                if [place, len(request.token_ids) - 1] in [[span[0], span[2]] for span in steps[number]["spans"]]
                and "failed" not in steps[number]
            ]  # fmt: skip
            assert row["end_step"] == last, "it ends with the step that drew its last token"
        assert all(number < row["gone_step"] for number in spans)


def check_owners(recording):
    """Each event on a block that is no pin's tells of a request that could have had to do with it."""
    replay = Replay(recording)
    names = {code: name for name, code in CODES.items()}
    while True:
        before = {block for table in replay.tables.values() for block in table}
        if not replay.forward():
            return
        events = replay.steps[replay.step]["blocks"]
        taken = {(block, who) for code, block, who in zip(*[iter(events)] * 3, strict=True) if names[code] == "take"}
        for code, block, who in zip(*[iter(events)] * 3, strict=True):
            if names[code] == "take" and replay.step:  # before step 0 comes what the recording began with
                assert who >= 0, "only requests take blocks"
            if names[code] == "evict":
                assert (block, who) in taken
            if names[code] == "know" and replay.step:
                assert block in before and who >= 0


def test_the_replay_is_what_the_books_said():
    total = Counter()
    for seed in SEEDS:
        total += check(seed)
    least = {
        "preemptions": 30, "evictions": 100, "aborts": 30, "pins": 10, "samples": 50, "failures": 20, "interrupts": 20,
        "refused": 3, "hits": 100, "dropped": 20, "failed": 40, "wait budget": 20, "wait seqs": 100, "wait blocks": 100,
        "wait preempted": 20, "end stop": 30, "end length": 100, "end abort": 20, "end error": 20,
    }  # fmt: skip
    assert {name: total[name] for name in least if total[name] < least[name]} == {}, total


@pytest.mark.parametrize("seed", range(12))
def test_seeking_is_going_there(seed):
    recording = Run(seed).serve()
    walked, jumping = Replay(recording), Replay(recording)
    states = [state(walked)]
    while walked.forward():
        states.append(state(walked))
    dice = random.Random(seed)
    for _ in range(10):
        step = dice.randrange(-1, len(recording["steps"]))
        jumping.seek(step)
        assert jumping.step == step and state(jumping) == states[step + 1]


@pytest.mark.parametrize("seed", range(30))
def test_a_full_recording_is_the_beginning_of_the_whole_one(seed):
    """What is kept stays exact, what is missing is counted, and nothing of the requests is kept alive."""
    run = Run(seed)
    whole = run.serve()
    most = len(whole["steps"]) // 2
    again = Run(seed, max_steps=most)
    cut = again.serve()
    assert again.recorder._alive == again.recorder._tables == {} and not again.recorder._under_way
    assert again.blocks.journal is None
    assert len(cut["steps"]) == most
    assert cut["dropped_steps"] == sum(bool(step["spans"]) for step in whole["steps"][most:])
    for one, other in zip(cut["steps"], whole["steps"], strict=False):
        assert {**one, "t": 0} == {**other, "t": 0}
    for one, other in zip(cut["requests"], whole["requests"], strict=False):
        assert one["prompt"] == other["prompt"] and one["ended"] is None or one["finish"] == other["finish"]
        if other["gone_step"] < most:
            assert {**one, "ended": 0} == {**other, "ended": 0, "arrived": one["arrived"]}
        else:
            assert one["gone_step"] in (None, most)
    replay = Replay(cut)
    for books in again.books.copies:
        assert replay.forward() and state(replay) == books
    replay.apply(cut["tail"])

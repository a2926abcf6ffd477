"""What a recording says of each step is what the books said: blocks, tables, LRU order, queues, tokens.

Random workloads over the shadow runner of the unit tests, on pools of a few blocks: preemption, eviction, chunks,
aborts before and during steps, several samples, pins, priorities, overlapped, failed and interrupted steps. Books are
copied when a decision is made, and compared with the replay when all is over.
"""

import random
from collections import Counter

import pytest

from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import Span
from nanovllm.trace.recording import CODES
from nanovllm.trace.replay import Replay

SEEDS = range(300)


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


def check(run):
    recording = run.serve()
    replay = Replay(recording)
    assert len(recording["steps"]) == len(run.books.copies)
    for number, books in enumerate(run.books.copies):
        assert replay.forward() and replay.step == number
        assert state(replay) == books, f"step {number}"
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
        assert [drawn[place][at] for at in sorted(drawn[place])] == request.token_ids[len(request.prompt_token_ids) :]
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
        elif row["finish"] == "abort":
            assert row["end_step"] == (row["gone_step"] - 1 if row["gone_step"] else None), "the last before it"
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


def test_the_replay_is_what_the_books_said(workload):
    total = Counter()
    for seed in SEEDS:
        try:
            total += check(workload(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    least = {
        "preemptions": 30, "evictions": 100, "aborts": 30, "pins": 10, "samples": 50, "failures": 20, "interrupts": 20,
        "refused": 3, "hits": 100, "dropped": 20, "failed": 40, "wait budget": 20, "wait seqs": 100, "wait blocks": 100,
        "wait preempted": 20, "end stop": 30, "end length": 100, "end abort": 20, "end error": 20,
    }  # fmt: skip
    assert {name: total[name] for name in least if total[name] < least[name]} == {}, total


@pytest.mark.parametrize("seed", range(12))
def test_seeking_is_going_there(workload, seed):
    recording = workload(seed).serve()
    walked, jumping = Replay(recording), Replay(recording)
    states = [state(walked)]
    while walked.forward():
        states.append(state(walked))
    dice = random.Random(seed)
    for _ in range(10):
        step = dice.randrange(-1, len(recording["steps"]))
        jumping.seek(step)
        assert jumping.step == step and state(jumping) == states[step + 1]


@pytest.mark.parametrize("seed", [*range(30), 45, 101, 133, 159, 193, 320])
def test_what_a_full_recording_misses_is_counted(workload, seed):
    """To the token, whoever ends, fails, is aborted or is preempted."""
    whole = workload(seed).serve()
    most = len(whole["steps"]) // 2
    again = workload(seed, max_steps=most)
    again.serve()
    assert (again.recorder.prompt_tokens, again.recorder.drawn_tokens) == counted(whole, most)


def test_what_is_counted_of_a_step(workload):
    """Parts of prompts, of one that is computed again too; tokens that were drawn and not dropped."""

    def span(start, stop, known=20, *, samples=True):
        request = Request(
            request_id="", prompt_token_ids=[1] * 8, params=SamplingParams(), max_tokens=99, arrival=0,
        )  # fmt: skip
        request.token_ids += [2] * (known - 8)
        return Span(request, start, stop, samples)

    recorder = workload(0).recorder
    recorder._count([span(9, 10), span(4, 12), span(11, 12), span(0, 8), span(2, 5, samples=False)])
    assert (recorder.prompt_tokens, recorder.drawn_tokens) == (4 + 8 + 3, 4)
    recorder._count([span(9, 10, 10), span(9, 10, 11), span(0, 8, 8)])
    assert (recorder.prompt_tokens, recorder.drawn_tokens) == (15 + 8, 4 + 1)


def counted(recording, first):
    """Tokens of prompts that the steps from ``first`` on have computed, and tokens that they have drawn."""
    done = [span for step in recording["steps"][first:] if "failed" not in step for span in step["spans"]]
    lengths = [len(row["prompt"]) for row in recording["requests"]]
    prompts = sum(max(0, min(stop, lengths[place]) - start) for place, start, stop, _ in done)
    return prompts, sum(token >= 0 for *_, token in done)


@pytest.mark.parametrize("seed", range(30))
def test_a_full_recording_is_the_beginning_of_the_whole_one(workload, seed):
    """What is kept stays exact, what is missing is counted, and nothing of the requests is kept alive."""
    run = workload(seed)
    whole = run.serve()
    most = len(whole["steps"]) // 2
    again = workload(seed, max_steps=most)
    cut = again.serve()
    recorder = again.recorder
    assert recorder._alive == recorder._ledger._tables == {} and not recorder._under_way and not recorder._run
    assert recorder._last is None and not recorder._asked
    assert again.blocks.journal is None
    assert len(cut["steps"]) == most
    assert cut["dropped_steps"] == sum(bool(step["spans"]) for step in whole["steps"][most:])
    for one, other in zip(cut["steps"], whole["steps"], strict=False):
        assert {**one, "t": 0} == {**other, "t": 0}
    for one, other in zip(cut["requests"], whole["requests"], strict=False):
        assert one["prompt"] == other["prompt"] and one["finish"] in (None, other["finish"])
        if other["gone_step"] < most:
            assert {**one, "ended": 0} == {**other, "ended": 0, "arrived": one["arrived"]}
        else:
            assert one["gone_step"] in (None, most)
    replay = Replay(cut)
    for books in again.books.copies:
        assert replay.forward() and state(replay) == books
    replay.apply(cut["tail"])

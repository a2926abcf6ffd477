"""The Chrome trace obeys its format's rules, and says what the recording says."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from nanovllm.trace import file
from nanovllm.trace.perfetto import DEVICE, ENGINE, MARK, PARTS, REQUESTS, chrome_trace, label
from nanovllm.trace.recording import FORMAT

SEEDS = range(40)

NEEDS = {"X": {"ts", "dur"}, "C": {"ts"}, "i": {"ts", "s"}, "M": set()}
"""What each phase has, beside ph, name, pid, tid and args."""


def check_rules(trace):
    """Those of the format's description, as far as our phases go."""
    assert trace["displayTimeUnit"] == "ms" and isinstance(trace["traceEvents"], list)
    named, rows, last = set(), defaultdict(list), 0
    for event in trace["traceEvents"]:
        assert set(event) == {"ph", "name", "pid", "tid", "args"} | NEEDS[event["ph"]]
        assert isinstance(event["name"], str) and event["name"] and isinstance(event["args"], dict)
        assert all(type(event[key]) is int and event[key] >= 0 for key in {"pid", "tid", "ts", "dur"} & set(event))
        if event["ph"] == "M":
            assert last == 0, "names come first"
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ts"] >= last, "sorted by time"
        last = event["ts"]
        assert ("process_name", event["pid"], 0) in named
        if event["ph"] == "C":
            assert event["args"] and all(type(value) is int and value >= 0 for value in event["args"].values())
        else:
            assert ("thread_name", event["pid"], event["tid"]) in named
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for (_, end), (start, _) in pairwise(row):
            assert end <= start, "slices of one row must not cross"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rules_of_the_format(workload, seed):
    check_rules(json.loads(json.dumps(chrome_trace(workload(seed).serve()))))


def test_an_empty_recording_is_a_trace():
    empty = {"format": FORMAT, "version": 1, "engine": {"num_blocks": 3}, "texts": {}, "requests": [], "steps": [],
             "tail": [], "dropped_steps": 0}  # fmt: skip
    check_rules(chrome_trace(empty))


def test_it_says_what_the_recording_says(workload):
    total = Counter()
    for seed in SEEDS:
        run = workload(seed)
        recording = run.serve()
        events = chrome_trace(recording)["traceEvents"]
        steps, requests = recording["steps"], recording["requests"]
        computed = [step for step in steps if step["spans"]]
        for row, (name, (first, last)) in enumerate(PARTS.items(), 1):
            found = [event for event in events if (event["pid"], event["tid"], event["ph"]) == (ENGINE, row, "X")]
            assert {event["name"] for event in found} <= {name}
            times = sorted((step["t"][first], step["t"][last] - step["t"][first]) for step in computed)
            assert sorted((event["ts"], event["dur"]) for event in found) == times
        device = [event for event in events if (event["pid"], event["tid"], event["ph"]) == (ENGINE, DEVICE, "X")]
        assert {event["args"]["step"]: event["args"]["tokens"] for event in device} == {
            number: sum(stop - start for _, start, stop, _ in step["spans"])
            for number, step in enumerate(steps)
            if step["spans"]
        }
        assert sum("failed" in event["args"] for event in device) == sum("failed" in step for step in steps)
        counters = [event for event in events if event["ph"] == "C"]
        blocks = [event["args"] for event in counters if event["name"] == "blocks"]
        queues = [event["args"] for event in counters if event["name"] == "requests"]
        for books, cells, queue in zip(run.books.copies, blocks, queues, strict=True):
            held = sum(readers > 0 for readers in books["readers"])
            assert cells == {"held": held, "cached": len(books["cached"]), "blank": books["blank"]}
            assert queue == {"running": len(books["running"]), "waiting": len(books["waiting"])}
        sizes = [event["args"] for event in counters if event["name"] == "tokens in the step"]
        assert sum(size["prefill"] + size["decode"] for size in sizes) == sum(
            stop - start for step in steps for _, start, stop, _ in step["spans"]
        )
        for place, request in enumerate(requests):
            lane = [event for event in events if (event["pid"], event["tid"]) == (REQUESTS, place + 1)]
            slices = [event for event in lane if event["ph"] == "X"]
            preempted = sum(step["preempted"].count(place) for step in steps)
            assert sum(event["name"] == "preempted" for event in lane if event["ph"] == "i") == preempted
            assert [event["name"] for event in lane][-1] == f"ended: {request['finish']}"
            assert lane[-1]["ts"] == request["ended"]
            spans = [span for step in steps for span in step["spans"] if span[0] == place]
            decodes = [event for event in slices if event["name"].startswith("decode")]
            assert sum(event["args"].get("steps", 0) for event in slices) == len(spans)
            assert all(event["name"] == f"decode {event['args']['tokens']} tokens" for event in decodes)
            total["waiting"] += sum(event["name"] == "waiting" for event in slices)
            total["prefill"] += sum(event["name"].startswith("prefill") for event in slices)
            total["preempted"] += preempted
            (name,) = [event["args"]["name"] for event in lane if event["name"] == "thread_name"]
            assert name == f"request {label(request)}"
    assert total["waiting"] > 100 and total["prefill"] > 100 and total["preempted"] >= 10


def test_a_gpu_s_row_is_from_submission_to_result(workload):
    recording = workload(1).serve()
    recording["engine"]["device"] = "cuda"
    recording["steps"] = recording["steps"][:2]
    for step, times in zip(recording["steps"], ([0, 10, 20, 30, 90, 95], [21, 25, 29, 96, 150, 155]), strict=True):
        step["t"] = times
    device = [event for event in chrome_trace(recording)["traceEvents"] if event["tid"] == DEVICE and "dur" in event]
    device = [(event["ts"], event["dur"]) for event in device if event["pid"] == ENGINE]
    assert device == [(20, 70), (90, 60)], "one step after the other, though the second was submitted meanwhile"


def test_our_files_are_known_by_their_beginning(open_llm, tmp_path):
    with open_llm(trace=str(tmp_path / "run.html")) as llm:
        llm.generate("one", use_tqdm=False)
    text = (tmp_path / "run.json").read_text()
    assert text.startswith(MARK) and file._ours(tmp_path / "run.json")
    check_rules(json.loads(text))

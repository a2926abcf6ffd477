"""A recording in the Chrome trace format, for Perfetto and chrome://tracing.

    engine     decide submit wait settle   the host's parts of each step, a row for each
               device                      from submitted to computed, one step after the other; a CPU is at work from
                                           the decision on
    requests   a row for each request      waiting, prefill [a, b), decode n tokens; marks where it was preempted
    counters   blocks, requests, tokens    after each decision

The format: Chromium's "Trace Event Format", JSON object form. Complete events (ph "X") with ts and dur in microseconds,
counters (C), instants (i), names (M); the events of one row nest or follow each other.
"""

from collections.abc import Iterator
from typing import Any

from nanovllm.trace.recording import Recording
from nanovllm.trace.replay import Replay

MARK = '{"displayTimeUnit":"ms","otherData":{"written by":"nanovllm"'
"""How our files begin, so that no other file is overwritten by mistake."""

Event = dict[str, Any]

ENGINE, REQUESTS = 1, 2
PARTS = {"decide": (0, 1), "submit": (1, 2), "wait": (3, 4), "settle": (4, 5)}
"""Rows of the host, and between which two of a step's times each lies."""
DEVICE = len(PARTS) + 1


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """Return the trace, to be written as JSON: names first, then all events by time."""
    events = [*_steps(recording), *_counters(recording), *_requests(recording)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"written by": "nanovllm", **recording["engine"], "dropped steps": recording["dropped_steps"]},
        "traceEvents": [*_names(recording), *sorted(events, key=lambda event: event["ts"])],
    }


def _names(recording: Recording) -> Iterator[Event]:
    rows = {(ENGINE, row): name for row, name in enumerate([*PARTS, "device"], 1)}
    rows |= {(REQUESTS, place + 1): f"request {label(row)}" for place, row in enumerate(recording["requests"])}
    for process, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield _event("M", "process_name", process, 0, args={"name": name})
        yield _event("M", "process_sort_index", process, 0, args={"sort_index": process})
    for (process, row), name in rows.items():
        yield _event("M", "thread_name", process, row, args={"name": name})
        yield _event("M", "thread_sort_index", process, row, args={"sort_index": row})


def _steps(recording: Recording) -> Iterator[Event]:
    free = 0  # when the device has done what came before
    begins = 1 if recording["engine"].get("device") == "cpu" else 2
    for number, step in enumerate(recording["steps"]):
        times = step["t"]
        if not step["spans"]:
            continue
        about = {
            "step": number,
            "requests": len(step["spans"]),
            "tokens": sum(stop - start for _, start, stop, _ in step["spans"]),
        }
        if "failed" in step:
            about["failed"] = step["failed"]
        for row, (name, (first, last)) in enumerate(PARTS.items(), 1):
            yield _slice(name, ENGINE, row, times[first], times[last], about)
        start = max(times[begins], free)
        free = max(times[4], start)
        yield _slice(f"step {number}", ENGINE, DEVICE, start, free, about)


def _counters(recording: Recording) -> Iterator[Event]:
    replay = Replay(recording)
    while replay.forward():
        step = replay.steps[replay.step]
        sizes = {"prefill": 0, "decode": 0}
        for request, start, stop, _ in step["spans"]:
            sizes[kind(recording["requests"][request], start, stop)] += stop - start
        counts = {
            "blocks": {"held": replay.num_held, "cached": len(replay.cached), "blank": replay.num_blank},
            "requests": {"running": replay.num_running, "waiting": replay.num_waiting},
            "tokens in the step": sizes,
        }
        for name, values in counts.items():
            yield _event("C", name, ENGINE, 0, ts=step["t"][1], args=values)


def _requests(recording: Recording) -> Iterator[Event]:
    """Yield each request's row: slices that follow each other, for steps overlap and a request has one row."""
    requests, steps = recording["requests"], recording["steps"]
    lanes: list[list[Event]] = [[] for _ in requests]
    until = [request["arrived"] for request in requests]
    waits = [True] * len(requests)
    for number, step in enumerate(steps):
        began, decided, settled = step["t"][0], step["t"][1], step["t"][5]
        for place in step["preempted"]:
            lanes[place].append(_event("i", "preempted", REQUESTS, place + 1, ts=decided, s="t", args={"step": number}))
            waits[place], until[place] = True, max(until[place], decided)
        for place, start, stop, token in step["spans"]:
            lane, row, ended = lanes[place], place + 1, requests[place]["ended"]
            end = settled if ended is None else min(settled, ended)  # it may end before the last of its steps
            if waits[place]:
                start_time = max(until[place], min(decided, end))
                lane.append(_slice("waiting", REQUESTS, row, until[place], start_time, {}))
                waits[place], until[place] = False, start_time
            what = kind(requests[place], start, stop)
            last = lane[-1]
            if what == "decode" and last["args"].get("kind") == "decode":
                last["dur"] = max(last["dur"], end - last["ts"])
                last["args"]["tokens"] += token >= 0
                last["args"]["steps"] += 1
                last["name"] = f"decode {last['args']['tokens']} tokens"
            else:
                name = f"prefill [{start}, {stop})" if what == "prefill" else f"decode {int(token >= 0)} tokens"
                about = {"kind": what, "tokens": stop - start if what == "prefill" else int(token >= 0), "steps": 1}
                begin = max(until[place], min(began, end))
                lane.append(_slice(name, REQUESTS, row, begin, max(begin, end), {**about, "first step": number}))
            until[place] = lane[-1]["ts"] + lane[-1]["dur"]
    for place, request in enumerate(requests):
        ended = request["ended"]
        if ended is not None and waits[place] and ended > until[place]:
            lanes[place].append(_slice("waiting", REQUESTS, place + 1, until[place], ended, {}))
        if ended is not None:
            name = f"ended: {request['finish']}"
            lanes[place].append(_event("i", name, REQUESTS, place + 1, ts=ended, s="t", args={}))
        yield from lanes[place]


def kind(request: dict[str, Any], start: int, stop: int) -> str:
    """Say what a span is: one token behind the prompt is a decode; what is computed again counts as a prompt's."""
    return "decode" if stop - start == 1 and start >= len(request["prompt"]) else "prefill"


def label(request: dict[str, Any]) -> str:
    """Return what a request is called: its name, and ``/sample`` for all but the first of several."""
    return f"{request['id']}/{request['sample']}" if request["sample"] else str(request["id"])


def _slice(name: str, process: int, row: int, start: int, stop: int, about: dict[str, Any]) -> Event:
    return _event("X", name, process, row, ts=start, dur=max(0, stop - start), args=about)


def _event(phase: str, name: str, process: int, row: int, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": process, "tid": row, **more}

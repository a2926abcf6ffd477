"""``nanovllm explain run.html [REQUEST]``: in words, what became of a request, and where its time went.

    arrived     admitted             first token                            ended
       |- waiting -|- its prompt, in chunks -|- a token in each of its steps -|     and again, if it is preempted

Each moment of a request's life belongs to its waiting, to a step that computes something of it, or to neither; a step
lasts from its beginning, or from when the one before it was settled, until it is settled itself.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.errors import nearest
from nanovllm.trace import recording as recordings
from nanovllm.trace.perfetto import kind, label
from nanovllm.trace.recording import FREE, HOLD, NOBODY, TAKE, Recording, TraceError, printable
from nanovllm.trace.replay import Replay

REASONS = {
    "budget": "the step's tokens were used up (max_num_batched_tokens)",
    "seqs": "as many requests ran as may (max_num_seqs)",
    "blocks": "not enough blocks of the cache were free",
    "preempted": "somebody had just been preempted for want of blocks",
    "prefix": "another one computed what its prompt begins with",
}
"""Why the first in the queue is not admitted."""

ENDS = {
    "stop": "its text came to an end",
    "length": "it had all the tokens that it may have",
    "abort": "its caller aborted it",
    "error": "its computation failed",
}

MOST_NAMED = 6
"""Chunks or requests that are named one by one; of more, the others are counted."""

COLUMNS = (
    "request",
    "prompt",
    "cached",
    "drawn",
    "waited s",
    "first token s",
    "total s",
    "tokens/s",
    "preempted",
    "end",
)


@dataclass(slots=True)
class Story:
    """What happened to one request; times in microseconds."""

    place: int
    """Its index in the recording."""
    num_admissions: int = 0
    admitted: int | None = None
    """The first step that computed something of it."""
    reasons: Counter[str] = field(default_factory=Counter)
    """In how many steps it was the first in the queue and not admitted, by reason."""
    num_behind: int = 0
    """In how many steps others stood before it in the queue."""
    sharers: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Blocks that it found at its first admission, by the requests that held them then, or the one that did last."""
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, start, stop) of each part of its prompt, and of what was computed again."""
    preempted: list[tuple[int, int]] = field(default_factory=list)
    """(step, the request that took its blocks)."""
    num_tokens: int = 0
    """Drawn."""
    first_token: int | None = None
    """When it was known."""
    last_token: int = 0
    waiting: int = 0
    prefill: int = 0
    decode: int = 0
    num_decodes: int = 0
    crowded: int = 0
    """Part of ``decode``: in steps that had tokens of others' prompts too."""
    num_crowded: int = 0
    device: int = 0
    """Part of its steps in which the host had nothing to do but wait for the device."""
    until: int = 0
    """When it ended, or the recording did."""
    failed: str | None = None
    """Why its last step failed."""


def stories(recording: Recording) -> list[Story]:
    """Return what happened to each request. Cost: one replay."""
    requests = recording["requests"]
    found = [Story(place) for place in range(len(requests))]
    since = [request["arrived"] for request in requests]  # from when it waits, if it does
    replay, settled = Replay(recording), 0
    while True:
        readers = list(replay.last_reader)
        if not replay.forward():
            break
        step = replay.steps[replay.step]
        began, ended = max(step["t"][0], settled), step["t"][5]
        for place, other in _preemptors(step).items():
            found[place].preempted.append((replay.step, other))
            since[place] = began
        for place in replay.admitted:
            until = requests[place]["ended"]
            found[place].waiting += max(0, (began if until is None else min(began, until)) - since[place])
            found[place].num_admissions += 1
            if found[place].admitted is None:
                found[place].admitted = replay.step
                _note_sharers(found[place], replay, readers)
        _note_spans(found, replay, began)
        for rank, place in enumerate(replay.waiting):
            if rank == 0 and step["wait"] is not None:
                found[place].reasons[step["wait"]] += 1
            else:
                found[place].num_behind += 1
        settled = max(settled, ended)
    for story, request in zip(found, requests, strict=True):
        story.until = settled if request["ended"] is None else request["ended"]
        if story.num_admissions == len(story.preempted):  # it has waited to the end
            story.waiting += max(0, story.until - since[story.place])
    return found


def _note_spans(found: list[Story], replay: Replay, began: int) -> None:
    step = replay.steps[replay.step]
    kinds = {place: kind(replay.requests[place], start, stop) for place, start, stop, _ in step["spans"]}
    crowded = "prefill" in kinds.values()
    for place, start, stop, token in step["spans"]:
        story, ended = found[place], replay.requests[place]["ended"]
        # where steps overlap, one may be settled when the request has ended
        length = max(0, (step["t"][5] if ended is None else min(step["t"][5], ended)) - began)
        story.device += min(length, step["t"][4] - step["t"][3])
        if kinds[place] == "prefill":
            story.chunks.append((replay.step, start, stop))
            story.prefill += length
        else:
            story.num_decodes += 1
            story.decode += length
            story.num_crowded += crowded
            story.crowded += length * crowded
        if token >= 0:
            story.num_tokens += 1
            story.last_token = step["t"][4]
            story.first_token = step["t"][4] if story.first_token is None else story.first_token
        if replay.requests[place]["end_step"] == replay.step:
            story.failed = step.get("failed")


def _events(step: dict[str, Any]) -> list[tuple[int, int, int]]:
    flat = step["blocks"]
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


def _preemptors(step: dict[str, Any]) -> dict[int, int]:
    """Return for whom each was preempted: who takes the next block. Itself, if it was the last and wanted one."""
    events = _events(step)
    found = {}
    for place in step["preempted"]:
        freed = [number for number, (code, _, owner) in enumerate(events) if (code, owner) == (FREE, place)]
        after = events[max(freed, default=len(events)) :]
        found[place] = next((owner for code, _, owner in after if code == TAKE), place)
    return found


def _note_sharers(story: Story, replay: Replay, readers: Sequence[int]) -> None:
    later: dict[int, set[int]] = {}  # who holds each block from this request's turn on
    for code, block, owner in reversed(_events(replay.steps[replay.step])):
        if code == HOLD:
            later.setdefault(block, set()).add(owner)
        if code == HOLD and owner == story.place:
            now = [place for place, table in replay.tables.items() if block in table and place not in later[block]]
            story.sharers[tuple(now) or (readers[block],)] += 1


def explain(recording: Recording, name: str) -> str:
    """Return the story of a request in words; ``name`` is its id, with ``/1`` for its second sample.

    Raises TraceError if there is none of that name.
    """
    labels = [label(request) for request in recording["requests"]]
    if name not in labels:
        some = ", ".join(labels[:20]) + (f" and {len(labels) - 20} more" if len(labels) > 20 else "")
        raise TraceError(
            f"request {name!r} is not in the recording.{nearest(name, labels)} Give one of: {some or 'there is none'}.",
            parameter="request", value=name,
        )  # fmt: skip
    told = stories(recording)
    return "\n\n".join(words(recording, story) for story in told if labels[story.place] == name)


def words(recording: Recording, story: Story) -> str:
    """Return one story, a line for each thing that happened."""
    request = recording["requests"][story.place]
    names = [label(each) for each in recording["requests"]]
    lines = [f"request {names[story.place]}: {counted(len(request['prompt']), 'prompt token')}, "
             f"{story.num_tokens} drawn, {seconds(story.until - request['arrived'])}"]  # fmt: skip
    lines.append(_waited(request, story))
    if request["cached"]:
        sharers = [f"{counted(number, 'block')} of {_holders(names, places)}"
                   for places, number in story.sharers.most_common(MOST_NAMED)]  # fmt: skip
        where = f": {'; '.join(sharers)}" if sharers else ""
        lines.append(f"found in the cache: {request['cached']} of its prompt's tokens{where}")
    else:
        lines.append("found in the cache: nothing of its prompt")
    if story.chunks:
        each = [f"[{start}, {stop}) in step {step}" for step, start, stop in story.chunks[:MOST_NAMED]]
        more = len(story.chunks) - len(each)
        lines.append(f"computed in {counted(len(story.chunks), 'chunk')}: {', '.join(each)}"
                     + (f" and {more} more" if more else ""))  # fmt: skip
    if story.preempted:
        each = [f"in step {step} for {'a block of its own' if place == story.place else f'request {names[place]}'}"
                for step, place in story.preempted[:MOST_NAMED]]  # fmt: skip
        more = len(story.preempted) - len(each)
        lines.append(f"preempted {counted(len(story.preempted), 'time')}: {', '.join(each)}"
                     + (f" and {more} more" if more else "")
                     + "; what the cache had not kept was computed again")  # fmt: skip
    lines += _times(request, story, cpu=recording["engine"].get("device") == "cpu")
    lines.append(_end(request, story))
    return "\n  ".join(lines)


def _holders(names: Sequence[str], places: tuple[int, ...]) -> str:
    if places == (NOBODY,):
        return "a pin, or of before the recording"
    named, more = [names[place] for place in places[:MOST_NAMED]], len(places) - MOST_NAMED
    if more > 0:
        return f"requests {', '.join(named)} and {more} more"
    *most, last = named
    return f"requests {', '.join(most)} and {last}" if most else f"request {last}"


def _waited(request: dict[str, Any], story: Story) -> str:
    if story.admitted is None:
        line = f"never admitted: came before step {request['before_step']}, waited {seconds(story.waiting)}"
    else:
        again = f" (and after being preempted, {seconds(story.waiting)} in all)" if story.preempted else ""
        waited = "" if story.preempted else f", after {seconds(story.waiting)}"
        line = f"came before step {request['before_step']}, was admitted in step {story.admitted}{waited}{again}"
    reasons = [f"{counted(number, 'step')} because {REASONS[name]}" for name, number in story.reasons.most_common()]
    if reasons:
        line += f"; first in the queue for {', for '.join(reasons)}"
    if story.num_behind:
        line += f"; behind others for {counted(story.num_behind, 'step')}"
    return line


def _times(request: dict[str, Any], story: Story, *, cpu: bool) -> list[str]:
    total = story.until - request["arrived"]
    lines = []
    if story.first_token is not None:
        line = f"first token after {seconds(story.first_token - request['arrived'])}"
        speed = tokens_per_second(story)
        lines.append(line if speed is None else f"{line}, then {speed:.1f} tokens/s")
    between = max(0, total - story.waiting - story.prefill - story.decode)
    prompt = "its prompt, and what was computed again" if story.num_admissions > 1 else "its prompt"
    parts = {"waiting": story.waiting, prompt: story.prefill, "decoding": story.decode, "other": between}
    spent = [f"{name} {seconds(part)} ({part / max(1, total):.0%})" for name, part in parts.items() if part]
    if spent:
        lines.append(f"where its time went: {', '.join(spent)}")
    if story.num_crowded:
        alone = story.num_decodes - story.num_crowded
        line = (f"{story.num_crowded} of its {counted(story.num_decodes, 'decode')} shared the step with prompts of "
                f"others, {seconds(story.crowded // story.num_crowded)} each")  # fmt: skip
        lines.append(line + (f"; the others {seconds((story.decode - story.crowded) // alone)}" if alone else ""))
    if story.device and not cpu:  # where the host is the device, it does not wait
        share = story.device / max(1, story.prefill + story.decode)
        lines.append(f"in its steps the host only waited for the device for {seconds(story.device)} ({share:.0%})")
    return lines


def _end(request: dict[str, Any], story: Story) -> str:
    if request["finish"] is None:
        return "it was still going when the recording stopped"
    when = "before the first step" if request["end_step"] is None else f"after step {request['end_step']}"
    why = ENDS.get(request["finish"], "see there")
    if request["finish"] == "length" and story.num_tokens < request["max_tokens"]:
        why = "it grew until the cache could hold no more of it"
    line = f"ended {when} ({request['finish']}): {why}"
    if request["stop"] is not None:
        line += f", at {request['stop']!r}"
    return line if story.failed is None else f"{line}: {story.failed}"


def table(recording: Recording) -> str:
    """Return a line for each request, and mark the slowest: the one that took longest from arrival to end."""
    told = stories(recording)
    rows = [COLUMNS]
    for story, request in zip(told, recording["requests"], strict=True):
        speed, arrived = tokens_per_second(story), request["arrived"]
        first = "-" if story.first_token is None else f"{(story.first_token - arrived) / 1e6:.3f}"
        rows.append(
            (
                label(request), str(len(request["prompt"])), str(request["cached"]), str(story.num_tokens),
                f"{story.waiting / 1e6:.3f}", first, f"{(story.until - arrived) / 1e6:.3f}",
                "-" if speed is None else f"{speed:.1f}", str(len(story.preempted)), str(request["finish"] or "-"),
            )
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if told:
        slowest = max(told, key=lambda story: story.until - recording["requests"][story.place]["arrived"])
        lines[slowest.place + 1] += "  <- slowest"
    return "\n".join(lines)


def tokens_per_second(story: Story) -> float | None:
    """Return how fast tokens came after the first one; None if there were not two."""
    if story.first_token is None or story.num_tokens < 2:
        return None
    return (story.num_tokens - 1) / max(1, story.last_token - story.first_token) * 1e6


def seconds(microseconds: int) -> str:
    """Write a time with the unit that suits it."""
    return f"{microseconds / 1e6:.2f} s" if microseconds >= 1_000_000 else f"{microseconds / 1e3:.1f} ms"


def counted(number: int, name: str) -> str:
    """Write a number of things."""
    return f"{number} {name}{'' if number == 1 else 's'}"


def run(args: argparse.Namespace) -> int:
    """Print the story of the request that ``args`` name, or a table of all."""
    recording = recordings.load(args.file)
    text = table(recording) if args.request is None else explain(recording, args.request)
    print("\n".join(map(printable, text.split("\n"))))
    if recording["dropped_steps"]:
        print(f"({counted(recording['dropped_steps'], 'step')} came after the recording was full)")
    return 0

"""What a recording looks like, and reading one back.

One JSON object. Times are whole microseconds since the recording began; "request" is an index into ``requests``, "step"
one into ``steps``.

    {
     "format": "nanovllm recording", "version": 1,
     "engine": {"nanovllm": "0.1.0", "model": "...", "device": "cpu", "device_name": "...", "dtype": "...",
                "block_size": 16, "num_blocks": 512, "max_num_seqs": 256, "max_num_batched_tokens": 512,
                "enable_prefix_caching": true, "policy": "fcfs", "started": "2026-11-30T06:40:00Z"},
     "texts": {"<token id>": "text of that token alone"},   every id that occurs; {} without a tokenizer. Bytes that are
                                    no whole character are surrogates, as Python's surrogateescape makes them
     "requests": [{
        "id": "0", "sample": 0, "arrived": 120,
        "before_step": 0,           the first step that was decided after it came
        "queued_step": 0,           the first one after whose decision it stands in the queue, or has been there
        "prompt": [ids], "priority": 0, "rank": 0, "max_tokens": 64, "params": {"temperature": 0.6},
                                    params: what differs from the defaults
        "cached": 32,               prompt tokens found in the prefix cache when it was first admitted
        "ended": 91234 | null, "end_step": 17 | null,   the step whose decision or settling ended it, or the last one
                                    before an abort. null: it was still going when the recording stopped
        "gone_step": 18 | null,     the first step after whose decision it is in no queue and holds no block any more
        "finish": "stop" | "length" | "abort" | "error" | null, "stop": null | id | "string", "text": "final text"
     }],
     "steps": [{
        "t": [began, decided, submitted, awaited, computed, settled],   steps may overlap; see StepTimes
        "spans": [[request, start, stop, token], ...],   it computes tokens [start, stop) of the request, and drew this
                                    one; -1: draws none; -2: drew, but dropped (it had ended, or the step failed)
        "preempted": [request, ...],
        "wait": null | "budget" | "seqs" | "blocks" | "preempted" | "prefix",   why the head of the queue was not
                                    admitted; null: nobody waits. "prefix": others compute what it can find soon
        "blocks": [code, block, request, ...],   flat: what happened to blocks since the decision before, in order, up
                                    to and including this step's decision
        "top": {"<request>": [[token, logprob], ...]},   of what it drew, that token first; only if logprobs were asked
                                    for
        "failed": "message"         only if it failed or was interrupted: then nothing came of it
     }],
     "tail": [code, block, request, ...],   block events after the last step's decision
     "dropped_steps": 0             so many steps came after the last one, and were not recorded
    }

A decision without a span is a step, with all its times the same, if it preempted or ended somebody. Codes of events,
as in ``BlockManager.journal``; request -1: nobody's (a pin, a reset). What was evicted is told of the request that
takes the block. A recording may begin with blocks that are cached or pinned: then step 0 has events of theirs.

    0 take    one reader; from the blank blocks, or after an evict and a forget
    1 hold    one reader more; leaves the list of cached blocks if it had none
    2 free    one reader less; with none left it goes to the end of that list if it can be found, else it is blank
    3 know    can be found from now on
    4 forget  cannot any more; leaves the list of cached blocks
    5 evict   tells why the next two come: a forget and a take of the same block

All else follows, and ``replay.Replay`` works it out. After the decision of step n those wait whose ``queued_step`` is
not above n, and those run who had a span and were not preempted since; neither, if their ``gone_step`` is not above n.
Both stand in the order of (rank, index of the request).
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from nanovllm.errors import NanoError, shown

FORMAT, VERSION = "nanovllm recording", 1

TAKE, HOLD, FREE, KNOW, FORGET, EVICT = range(6)
CODES = {"take": TAKE, "hold": HOLD, "free": FREE, "know": KNOW, "forget": FORGET, "evict": EVICT}
NOBODY = -1
NO_DRAW, DROPPED = -1, -2

Recording = dict[str, Any]

PAGE, PLAIN = ".html", ".recording.json"
"""How the files end that hold a recording."""

EMBEDDED = re.compile(r'<script type="application/json" id="recording">(.*?)</script>', re.DOTALL)
"""Where a page holds its recording; "<" in it is written as an escape of JSON, so nothing in a text ends it early."""

PARTS = {"engine": dict, "texts": dict, "requests": list, "steps": list, "tail": list}


class TraceError(NanoError, ValueError):
    """A file holds no recording that can be read here, or not what was asked of it."""


def load(path: str) -> Recording:
    """Read a recording from a ``.recording.json``, or from the page that holds it.

    Raises TraceError: no such file, no recording in it, one of another version.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _refuse(path, f"cannot be read: {reason}", "Give a page or a .recording.json that LLM(..., trace=...) wrote")
    embedded = EMBEDDED.search(text)
    try:
        found = json.loads(text if embedded is None else embedded.group(1))
    except (ValueError, RecursionError):
        found = None
    return check(found, path)


def check(found: Any, path: str = "recording") -> Recording:
    """Return what was read, if it is a recording of this version; else raise TraceError."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        _refuse(path, "holds no recording", "Give a page or a .recording.json that LLM(..., trace=...) wrote; a Chrome "
                "trace does not hold all that a recording does")  # fmt: skip
    if found.get("version") != VERSION:
        version = shown(found.get("version"))
        _refuse(path, f"is a recording of version {version}, and this nanovllm reads version {VERSION}",
                "Read it with the nanovllm that wrote it, or record again")  # fmt: skip
    for name, kind in PARTS.items():
        if not isinstance(found.get(name), kind):
            _refuse(path, f"is a recording whose {name!r} is {shown(found.get(name))[:80]}", "Record again")
    recording: Recording = found
    return recording


def of_replica(path: str, replica: int) -> str:
    """Return where a replica writes: ``run.replica-0.html`` for ``run.html``. A path that is none stays as it is."""
    target = Path(path)
    for ending in (PAGE, PLAIN):
        stem = target.name.removesuffix(ending)
        if stem and stem != target.name:
            return str(target.with_name(f"{stem}.replica-{replica}{ending}"))
    return path


def printable(text: str) -> str:
    """Return a line that a terminal may be shown: names come from whoever sends requests, and may be commands to it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def dump(recording: Recording) -> str:
    """Return a recording as compact JSON."""
    return json.dumps(recording, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def replace(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # JSON is all that may hold a lone surrogate, and this is how JSON writes one
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _refuse(path: str, found: str, way_out: str) -> NoReturn:
    raise TraceError(f"{path} {found}. {way_out}.", parameter="path", value=path)

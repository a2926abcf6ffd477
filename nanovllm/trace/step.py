"""Recorded steps in a few numbers: taking them down is what the engine waits for, JSON is made when somebody asks.

Most steps are one of many in which the same requests decode. Such a run is one array, and spans follow from it:

    step 0   [start, stop)         draws token 0
    step 1   [stop, stop + 1)      draws token 1
    step 2   [stop + 1, stop + 2)  draws token 2

All this is written once, when the run is over; then any thread may read it.
"""

import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanovllm.trace.recording import NO_DRAW

AROUND = len('{"t":[],"spans":[],"preempted":[],"wait":"budget","blocks":[]},')
PER_SPAN = len("[,,,],")
PER_EVENT = len("0,1234,56,")
"""More or less: of a hundred bytes five are such."""


class Run:
    """Spans of ``num_steps`` steps that compute and draw for the same requests, or of one step of any kind.

    ``starts`` and ``stops`` are those of the first step; ``tokens`` those that the first request has drawn in all
    steps, then those of the second, and so on.
    """

    __slots__ = ("_ints", "num_spans", "num_steps")

    def __init__(
        self, requests: list[int], starts: list[int], stops: list[int], tokens: list[int], num_steps: int = 1
    ) -> None:
        self._ints = array("i", requests + starts + stops + tokens)
        self.num_spans, self.num_steps = len(requests), num_steps

    def spans(self, number: int) -> list[list[int]]:
        """Return those of one step, as in a recording."""
        width, ints = self.num_spans, self._ints
        stops = [stop + number for stop in ints[2 * width : 3 * width]]
        starts = [stop - 1 for stop in stops] if number else ints[width : 2 * width]
        return [list(span) for span in zip(ints[:width], starts, stops, self.tokens(number), strict=True)]

    def tokens(self, number: int) -> "array[int]":
        """Return what one step drew."""
        return self._ints[3 * self.num_spans + number :: self.num_steps]

    @property
    def num_bytes(self) -> int:
        """How long the JSON of all spans is, but for a place or two that grow by a digit within the run."""
        width, steps, digits = self.num_spans, self.num_steps, num_digits(self._ints)
        places, starts, stops = digits[: 3 * width].reshape(3, width).sum(axis=1).tolist()
        size: int = steps * (places + stops + PER_SPAN * width) + starts + (steps - 1) * stops
        return size + int(digits[3 * width :].sum())


class Step:
    """One step of a recording, number ``number`` of its run. ``top`` and ``failed`` as in the format, or None."""

    __slots__ = ("_blocks", "_failed", "_number", "_preempted", "_text", "_times", "_top", "_wait", "run")

    def __init__(
        self, run: Run, number: int, times: Sequence[int], blocks: Sequence[int], *, preempted: Sequence[int],
        wait: str | None, top: dict[str, Any] | None = None, failed: str | None = None,
    ) -> None:  # fmt: skip
        self.run, self._number = run, number
        self._times, self._blocks = array("q", times), array("i", blocks)
        self._preempted, self._wait, self._top, self._failed = tuple(preempted), wait, top, failed
        self._text: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return it as in a recording."""
        facts: dict[str, Any] = {
            "t": self._times.tolist(),
            "spans": self.run.spans(self._number),
            "preempted": list(self._preempted),
            "wait": self._wait,
            "blocks": self._blocks.tolist(),
        }
        if self._top:
            facts["top"] = self._top
        if self._failed is not None:
            facts["failed"] = self._failed
        return facts

    def json(self) -> str:
        """Return it as compact JSON, which is made once, for all who watch."""
        text = self._text
        if text is None:
            text = self._text = json.dumps(self.facts(), ensure_ascii=False, separators=(",", ":"))
        return text

    def ids(self) -> set[int]:
        """Return the tokens that occur in it."""
        found = set(self.run.tokens(self._number))
        found.update(token for best in (self._top or {}).values() for token, _ in best)
        return {token for token in found if token > NO_DRAW}

    @property
    def num_spans(self) -> int:
        """How many requests it computes something of."""
        return self.run.num_spans

    @property
    def num_bytes(self) -> int:
        """How long its JSON is without the spans, but for a few bytes."""
        size = AROUND + 6 * len(f"{self._times[-1]},") + PER_EVENT * (len(self._blocks) // 3)
        size += 6 * len(self._preempted) + len(self._failed or "")
        return size + (len(json.dumps(self._top)) if self._top else 0)


def num_digits(ints: "array[int]") -> Any:
    """Return how many characters each number, of 32 bits, is in decimal."""
    values = np.asarray(ints)
    digits = 1 + (values < 0)
    for power in range(1, len(str(values.max(initial=0)))):
        digits += values >= 10**power
    return digits

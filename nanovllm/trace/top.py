"""``nanovllm top``: what an engine with ``live=PORT`` is doing, in a terminal."""

import argparse
import http.client
import json
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from nanovllm.errors import EngineError
from nanovllm.trace.live import END, HOST
from nanovllm.trace.perfetto import label
from nanovllm.trace.recording import FREE, HOLD, NOBODY, TAKE, printable

WINDOW = 2_000_000
"""Microseconds of steps that the rate is taken from."""
MOST_ROWS, WIDTH = 20, 10
"""Requests that are shown, and characters of their names."""
SECONDS = 60
"""After so long without a word from the engine, which says something every few seconds, it is gone."""
CLEAR = "\x1b[H\x1b[J"


class Screen:
    """What there is to see, from the messages that ``live`` sends."""

    def __init__(self) -> None:
        self._engine: dict[str, Any] = {}
        self._requests: list[dict[str, Any]] = []
        self._drawn: list[int] = []
        self._running: list[int] = []
        self._readers: dict[int, list[int]] = {}  # requests that have taken a block and not given it back yet
        self._recent: deque[tuple[int, int]] = deque()  # when a step was settled, and what it drew
        self._num_steps = self._num_preempted = self._num_dropped = 0
        self._now: dict[str, Any] = {}  # once the recording is full

    def read(self, message: dict[str, Any]) -> None:
        """Take in a message; an empty one says that nothing has happened for a while."""
        if not message:
            self._recent.clear()
        self._engine = message.get("engine", self._engine)
        self._num_dropped = message.get("dropped_steps", self._num_dropped)
        for facts in message.get("requests", ()):
            if facts["index"] == len(self._requests):
                self._requests.append({})
                self._drawn.append(0)
            self._requests[facts["index"]] |= facts
        for step in message.get("steps", ()):
            self._num_steps += 1
            self._num_preempted += len(step["preempted"])
            self._running = [span[0] for span in step["spans"]]
            drawn = [span[0] for span in step["spans"] if span[3] >= 0]
            for place in drawn:
                self._drawn[place] += 1
            self._recent.append((step["t"][5], len(drawn)))
            events = step["blocks"]
            for code, block, place in zip(events[::3], events[1::3], events[2::3], strict=True):
                readers = self._readers.setdefault(block, [])
                if code in (TAKE, HOLD):
                    readers.append(place)
                elif code == FREE:
                    readers.remove(place)
        if "now" in message:
            now, before = message["now"], self._now.get("drawn_tokens", 0)
            self._recent.append((round(now["seconds"] * 1e6), now["drawn_tokens"] - before))
            self._now = now
        while self._recent and self._recent[-1][0] - self._recent[0][0] > WINDOW:
            self._recent.popleft()

    def text(self) -> str:
        """Return it as lines."""
        blocks = self._engine.get("num_blocks", 0)
        name = printable(str(self._engine.get("model")))
        model = f"{name} on {self._engine.get('device_name')}, {self._engine.get('dtype')}"
        if self._now:
            used, cached = self._now["held"], self._now["cached"]
            share = used / max(blocks, 1)
            return "\n".join([
                model,
                f"running {self._now['running']}  waiting {self._now['waiting']}  "
                f"steps {self._num_steps + self._num_dropped}",
                f"{self._rate():,.0f} tokens/s  blocks {used} of {blocks} ({share:.0%}), {cached} cached",
                "",
                f"the recording is full: {self._num_dropped} steps are not in it, and nobody knows by name who runs",
            ])  # fmt: skip
        alive = {place for place, row in enumerate(self._requests) if row["ended"] is None}
        running = [place for place in self._running if place in alive]
        waiting = len(alive) - len(running)
        # that a request gave its blocks back is told with the next step, and there may be none
        reading = alive | {NOBODY}
        used = sum(not reading.isdisjoint(readers) for readers in self._readers.values())
        lines = [
            model,
            f"running {len(running)}  waiting {waiting}  ended {len(self._requests) - len(alive)}  "
            f"steps {self._num_steps}  preempted {self._num_preempted}",
            f"{self._rate():,.0f} tokens/s  blocks {used} of {blocks} ({used / max(blocks, 1):.0%})",
            "",
            f"{'request':>{WIDTH}} {'prompt':>7} {'drawn':>7} {'of':>7}",
        ]
        for place in running[:MOST_ROWS]:
            row = self._requests[place]
            name = printable(label(row))
            name = name if len(name) <= WIDTH else f"{name[: WIDTH - 1]}…"
            numbers = (len(row["prompt"]), self._drawn[place], row["max_tokens"])
            lines.append(f"{name:>{WIDTH}} " + " ".join(f"{number:>7}" for number in numbers))
        if len(running) > MOST_ROWS:
            lines.append(f"{f'and {len(running) - MOST_ROWS} more':>{WIDTH}}")
        return "\n".join(lines)

    def _rate(self) -> float:
        """Return tokens drawn each second, lately."""
        if len(self._recent) < 2:
            return 0.0
        span = self._recent[-1][0] - self._recent[0][0]
        return sum(drawn for _, drawn in list(self._recent)[1:]) * 1e6 / max(span, 1)


def run(args: argparse.Namespace) -> int:
    """Show the engine at a port until it is closed, or Ctrl-C comes."""
    screen, redraws = Screen(), sys.stdout.isatty()
    for message in messages(args.port):
        screen.read(message)
        if message.get("behind"):
            continue
        print(f"{CLEAR if redraws else ''}{screen.text()}", flush=True)
    print("the engine is closed", file=sys.stderr)
    return 0


def messages(port: int) -> Iterator[dict[str, Any]]:
    """Yield what the engine at a port says, until it is closed: an empty message if there is no news for long.

    Raises EngineError if there is none, or it is gone without a word.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=SECONDS)
    try:
        connection.request("GET", "/events")
        response = connection.getresponse()
        if response.status == 503:
            raise EngineError(f"port {port} has no place for one more: {response.reason}. Close a page or a terminal.")
        if response.status != 200:
            raise EngineError(f"port {port} answers {response.status} {response.reason}; it is no engine to watch.")
        for line in response:
            if line == f"event: {END}\n".encode():
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
            elif line.startswith(b":"):
                yield {}
        raise EngineError(f"the engine at port {port} is gone without a word: its process was killed, or has failed.")
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(
            f"no engine can be watched at port {port} ({error}). Start one with live={port}, or with --live {port}."
        ) from error
    finally:
        connection.close()

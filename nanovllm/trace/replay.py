"""The state of an engine after each recorded step, worked out again from a recording.

What is kept is what changes: blocks by their events, requests by their spans. So going forward a step costs what
happened in it, and going back starts from the beginning.
"""

from collections import defaultdict
from typing import Any

from nanovllm.trace.recording import EVICT, FORGET, FREE, HOLD, KNOW, NOBODY, TAKE, Recording


class Replay:
    """A recording that can be wound: ``forward`` by one step, or to any one with ``seek``. See ``recording``.

    ``step`` is the last one whose decision has happened, -1 at the start.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.requests: list[dict[str, Any]] = recording["requests"]
        self.steps: list[dict[str, Any]] = recording["steps"]
        self.num_blocks: int = recording["engine"]["num_blocks"]
        self._queued: dict[int, list[int]] = defaultdict(list)
        self._gone: dict[int, list[int]] = defaultdict(list)
        for place, request in enumerate(self.requests):
            queued, gone = request.get("queued_step", request["before_step"]), request.get("gone_step")
            if queued is not None:
                self._queued[queued].append(place)
            if gone is not None:
                self._gone[gone].append(place)
        self._rewind()

    def _rewind(self) -> None:
        self.step = -1
        self.readers = [0] * self.num_blocks
        """How many requests and pins hold each block."""
        self.num_held = 0
        """Blocks that somebody holds."""
        self.findable: set[int] = set()
        self.cached: dict[int, None] = {}
        """Blocks that nobody reads and that can be found, the least recently used first."""
        self.tables: dict[int, list[int]] = {}
        """Blocks of each request that holds some, in the order of its tokens."""
        self.last_reader = [NOBODY] * self.num_blocks
        """The request that has held each block last, as far as it was one."""
        self.admitted: set[int] = set()
        """The requests that the last step has admitted."""
        self._waiting: set[int] = set()
        self._running: set[int] = set()

    @property
    def waiting(self) -> list[int]:
        """The requests in the waiting queue, the first one first."""
        return sorted(self._waiting, key=self._order)

    @property
    def running(self) -> list[int]:
        """The requests that run, in their order."""
        return sorted(self._running, key=self._order)

    @property
    def num_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """How many run."""
        return len(self._running)

    @property
    def num_blank(self) -> int:
        """Blocks that hold nothing worth keeping."""
        return self.num_blocks - self.num_held - len(self.cached)

    def forward(self) -> bool:
        """Go to the next step; False, and nothing happens, at the last one."""
        if self.step + 1 >= len(self.steps):
            return False
        self.step += 1
        step = self.steps[self.step]
        self.apply(step["blocks"])
        self._waiting.update(self._queued[self.step])
        self.admitted = {span[0] for span in step["spans"]} - self._running
        self._waiting -= self.admitted
        self._running |= self.admitted
        self._running.difference_update(step["preempted"])
        self._waiting.update(step["preempted"])
        self._waiting.difference_update(self._gone[self.step])
        self._running.difference_update(self._gone[self.step])
        return True

    def seek(self, step: int) -> None:
        """Go to a step, from -1 to the last one. Cost: of the steps between, or of all before it when going back."""
        if step < self.step:
            self._rewind()
        while self.step < step and self.forward():
            pass

    def apply(self, events: list[int]) -> None:
        """Let block events happen, as ``forward`` does; ``tail`` is what comes after the last step."""
        codes, blocks, owners = iter(events[::3]), iter(events[1::3]), iter(events[2::3])
        for code, block, request in zip(codes, blocks, owners, strict=True):
            if code in (TAKE, HOLD):
                self.num_held += self.readers[block] == 0
                self.readers[block] += 1
                self.cached.pop(block, None)
                self.last_reader[block] = request
                if request != NOBODY:
                    self.tables.setdefault(request, []).append(block)
            elif code == FREE:
                self._free(block, request)
            elif code == KNOW:
                self.findable.add(block)
            elif code == FORGET:
                self.findable.discard(block)
                self.cached.pop(block, None)
            else:
                assert code == EVICT, f"there is no block event {code}"

    def _free(self, block: int, request: int) -> None:
        self.readers[block] -= 1
        self.num_held -= self.readers[block] == 0
        if self.readers[block] == 0 and block in self.findable:
            self.cached[block] = None
        table = self.tables.get(request)
        if table is not None:
            table.remove(block)
            if not table:
                del self.tables[request]

    def _order(self, place: int) -> tuple[int, int]:
        return self.requests[place]["rank"], place

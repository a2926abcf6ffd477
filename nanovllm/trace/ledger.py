"""Whose blocks: the block manager's journal, with the request that each event is about.

The journal does not say for whom a block was taken; a request's block table, before and after, does.
"""

from collections.abc import Mapping, Sequence

from nanovllm.block_manager import BlockManager
from nanovllm.request import Request
from nanovllm.scheduler import Scheduler
from nanovllm.trace.recording import CODES, EVICT, FORGET, FREE, HOLD, KNOW, NOBODY, TAKE


class Ledger:
    """Reads the journal of an engine's block manager, which it begins."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._blocks = scheduler, scheduler.blocks
        self._tables: dict[Request, list[int]] = {}  # of those that held blocks when the journal was last read
        self._takers = [NOBODY] * self._blocks.num_blocks  # for whom a block was taken, while that one holds it
        self.events = inherited(self._blocks)
        """What has been read since the last cut, as a recording has it: code, block, request, and so on."""
        self._blocks.journal = []

    def cut(self) -> list[int]:
        """Return the events, and begin anew."""
        events, self.events = self.events, []
        return events

    def stop(self) -> None:
        """Read no more."""
        self._blocks.journal = None
        self._tables.clear()

    def read(self, places: Mapping[Request, int], likely: Sequence[Request] = ()) -> None:
        """Move the journal into the events, with the place of each request; those that have none are nobody's.

        Between two readings a request's table grows, or goes, or comes: so its length tells what happened. Pins come
        before a decision, so that requests own the last of the events that a block has had, and those that are admitted
        together theirs in the order in which they run. Who waits has no blocks and costs nothing. If what ``likely``
        ones have gained and lost explains the journal, nobody else is looked at.
        """
        if not self._blocks.journal:
            return
        journal, tables = [(CODES[name], block) for name, block in self._blocks.journal], self._tables
        self._blocks.journal = []
        changed = [request for request in likely if request in places]
        grown = [len(request.block_ids) - len(tables.get(request, ())) for request in changed]
        codes = [code for code, _ in journal]
        gains, losses = sum([each for each in grown if each > 0]), sum([each for each in grown if each < 0])
        if codes.count(TAKE) + codes.count(HOLD) != gains or codes.count(FREE) != -losses:
            changed = [request for request, table in tables.items() if len(request.block_ids) != len(table)]
            changed.sort(key=places.__getitem__)
            changed += [each for each in self._scheduler.running if each not in tables and each in places]
        gained: dict[int, list[int]] = {}
        lost: dict[int, list[int]] = {}
        for request in changed:
            before, now, place = tables.setdefault(request, []), request.block_ids, places[request]
            new, old = now[len(before) :], before[len(now) :]
            for block in new:
                gained.setdefault(block, []).append(place)
            for block in old:
                lost.setdefault(block, []).append(place)
            before[len(now) :] = new
            if not before:
                del tables[request]
        self._write(journal, gained, lost)

    def _write(self, journal: list[tuple[int, int]], gained: dict[int, list[int]], lost: dict[int, list[int]]) -> None:
        owners, takes = [NOBODY] * len(journal), dict[int, int]()
        for i in range(len(journal) - 1, -1, -1):
            code, block = journal[i]
            if code <= FREE:
                whose = (lost if code == FREE else gained).get(block)
                if whose:
                    owners[i] = whose.pop()
                if code == TAKE:
                    takes[block] = owners[i]
            elif code == EVICT:
                owners[i] = owners[i + 1] = takes.pop(block, NOBODY)
        takers, events, previous = self._takers, self.events, EVICT
        for (code, block), owner in zip(journal, owners, strict=True):
            if code == TAKE:
                takers[block] = owner
            elif code == KNOW or (code == FORGET and previous != EVICT):
                owner = takers[block]
            elif code == FREE and owner == takers[block]:
                takers[block] = NOBODY
            events += (code, block, owner)
            previous = code


class Due:
    """Requests that decode, by the step in which they need the next block."""

    def __init__(self, block_size: int) -> None:
        self._size, self._step = block_size, 0
        self._phases: dict[Request, int] = {}
        self._requests: list[dict[Request, None]] = [{} for _ in range(block_size)]

    def __contains__(self, request: Request) -> bool:
        return request in self._phases

    def add(self, request: Request, stop: int) -> None:
        """Add one that reaches ``stop`` in this step, and one token more in each to come."""
        phase = self._phases[request] = (self._step + 1 - stop) % self._size
        self._requests[phase][request] = None

    def pop(self, request: Request) -> None:
        """Forget one, if it is there."""
        phase = self._phases.pop(request, None)
        if phase is not None:
            del self._requests[phase][request]

    def now(self) -> list[Request]:
        """Return those that begin a block in this step."""
        return list(self._requests[self._step % self._size])

    def tick(self) -> None:
        """Go to the next step."""
        self._step += 1


def inherited(blocks: BlockManager) -> list[int]:
    """Return the events that make the books what they are now: those of pins, and of what is cached."""
    events: list[int] = []
    cached = [blocks._blocks[index] for index in blocks._cached]
    held = [block for block in blocks._blocks if block.ref_count]
    for block in held + cached:
        told = [TAKE, *[HOLD] * (block.ref_count - 1), *[KNOW] * (block.digest is not None)]
        for code in told if block.ref_count else [*told, FREE]:
            events += (code, block.index, NOBODY)
    return events

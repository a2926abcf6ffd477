"""What may come between two lines: Ctrl-C, and the collection of garbage.

Ctrl-C between two lines of bookkeeping would leave books that do not balance, so it waits for the end of a step. A full
collection looks at all objects there are, 200,000 of PyTorch alone, and holds every request up for 0.1 s.
"""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class HeldBack:
    """Within it Ctrl-C is raised by ``check``, and at the end, and nowhere else; a second Ctrl-C at once.

    Does nothing outside the main thread, which never sees one, or where the program handles Ctrl-C in its own way.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._came = False

    def __enter__(self) -> "HeldBack":
        plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if plain and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def _hold(self, *_: object) -> None:
        self.check()
        self._came = True


FROZEN_AT_START = 1000
"""More objects than an interpreter freezes by itself: Python 3.12 some hundreds, others none."""


@contextmanager
def old_objects_kept() -> Iterator[None]:
    """Within it nothing that is there now is looked at for garbage: all of it is, as ever, afterwards.

    Does nothing where the program has frozen objects itself, or another call is within. Who stays long within it
    collects first.
    """
    ours = gc.get_freeze_count() < FROZEN_AT_START
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """Within it no garbage is collected, so that no finalizer runs between two lines."""
    ours = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ours:
            gc.enable()

"""The processes of an engine, and the thread that notices when one of them is lost.

The guard asks each worker for a sign of life four times a second. A worker whose connection ends has died; one that
does not answer for PATIENCE seconds is frozen. Then all are killed, and whoever waits for them gets an error.
"""

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection as Channel

from nanovllm.parallel.communicator import Connection

logger = logging.getLogger(__name__)

PERIOD, PATIENCE, START_PATIENCE = 0.25, 5.0, 120.0
"""Seconds between two looks at the workers, and without a sign of life: when they run, and until they first do."""

END_SECONDS = 2.0
"""For workers to end by themselves."""

VERDICT_SECONDS = 1.5
"""For the guard to find out why something failed."""

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"
"""What a worker's interpreter runs: not the user's main module, which needs no ``if __name__ == "__main__"``."""


class Worker:
    """A process that runs ``main`` of a module, the channel on which it is told what to do, and the connection on
    which it says that it lives. ``name`` is what errors call it; ``more`` are sockets that it inherits behind these.
    """

    def __init__(self, name: str, module: str, *more: socket.socket) -> None:
        self.name = name
        channel, its_channel = socket.socketpair()
        self.life, its_life = socket.socketpair()
        with channel, its_channel, its_life:
            inherited = tuple(each.fileno() for each in (its_channel, its_life, *more))
            self.process = subprocess.Popen(
                [sys.executable, "-c", START.format(module), json.dumps(sys.path), *map(str, inherited)],
                pass_fds=inherited, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self.channel = Channel(channel.detach())
        self.life.setblocking(False)
        self._heard = b""
        self._silent = 0.0

    def look(self) -> str | None:
        """Ask for a sign of life; return why there will be none any more."""
        try:
            said = self.life.recv(2**16)
            if not said:
                return self._last_words()
            self._heard = (self._heard + said).lstrip(b".")[-(2**16) :] or b"."
            self._silent = 0.0
        except BlockingIOError:
            self._silent += PERIOD
        except OSError:
            return self._last_words()
        patience = PATIENCE if self._heard else START_PATIENCE
        if self._silent > patience:
            return f"{self.name} has not answered for {patience:g} s"
        with suppress(OSError):  # its end shows when we read
            self.life.send(b".")
        return None

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        words = self._heard.strip(b".").decode(errors="replace").partition("!")[2]
        return f"{self.name} " + (f"failed with {words}" if words else f"died (status {self.process.returncode})")

    def end(self, deadline: float, *, at_once: bool = True) -> None:
        """Let the process end, or kill it at ``deadline``. Not ``at_once``: it may first end what it started itself."""
        self.channel.close()
        if at_once:
            self.life.close()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.life.close()


class Guard(threading.Thread):
    """Looks after workers until ``stop``; kills all of them when one is lost."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__(name="nanovllm-guard", daemon=True)
        self.reason: str | None = None
        self.communicator: Connection | None = None
        self._workers = workers
        self._stopped = threading.Event()
        self.failed = threading.Event()

    def run(self) -> None:
        """Look after them."""
        while not self._stopped.wait(PERIOD):
            lost = [reason for worker in self._workers if (reason := worker.look())]
            if lost:
                # a rank that fails takes others with it, which say less
                self.reason = next((reason for reason in lost if "failed with" in reason), lost[0])
                logger.error("the engine is lost: %s", self.reason)
                for worker in self._workers:
                    worker.process.kill()
                self.failed.set()
                if self.communicator is not None:
                    self.communicator.close()
                return

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self.join(END_SECONDS)

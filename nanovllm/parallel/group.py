"""Rank 0's view of the others: starts them, tells them each step, notices when one is lost, ends them all.

When the guard (``guard``) has found one lost, whoever waits for it, in gloo or NCCL, gets an error: the engine is lost,
and closes. Ctrl-C reaches the user's process alone, and not in mid-step.
"""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine import Fetch
from nanovllm.errors import ConfigError, EngineError, NanoError
from nanovllm.parallel.communicator import new_identity
from nanovllm.parallel.guard import END_SECONDS, PERIOD, VERDICT_SECONDS, Guard, Worker
from nanovllm.parallel.messages import Describer
from nanovllm.parallel.rank import Rank
from nanovllm.request import Sampled
from nanovllm.scheduler import SchedulerOutput

WORKER = "nanovllm.parallel.worker"


class Group(Rank):
    """The ranks of an engine, as rank 0 sees them. Raises ConfigError before anything starts."""

    def __init__(self, config: EngineConfig, facts: Any) -> None:
        super().__init__(0, config, facts)
        devices = _devices(facts.device, self.size)
        self.runner: Any = None
        self._threads = torch.get_num_threads()
        self._folder = Path(tempfile.mkdtemp(prefix="nanovllm-"))
        self._lock = threading.Lock()
        self._closed = False
        self._meeting_error: Exception | None = None
        self._workers: list[Worker] = []
        self._guard = Guard(self._workers)
        threads = max(1, self._threads // self.size)
        if self.device.type == "cpu":
            torch.set_num_threads(threads)
        with self.guarding():
            for rank in range(1, self.size):
                self._workers.append(Worker(f"rank {rank}", WORKER))
            self._guard.start()
            for rank, worker in enumerate(self._workers, 1):
                options = asdict(replace(config, device=devices[rank], use_tqdm_on_load=False))
                hello = {"rank": rank, "threads": threads, "options": options}
                hello["store"] = str(self._folder / "store")
                worker.channel.send_bytes(json.dumps(hello).encode())

    def connect(self) -> None:
        """Meet the others, once all have loaded their weights."""
        for worker in self._workers:
            self._receive(worker)
        identity = new_identity() if self.device.type == "cuda" else b"gloo"
        for worker in self._workers:
            worker.channel.send_bytes(identity)
        meeting = threading.Thread(target=self._meet, args=(identity,), daemon=True)
        meeting.start()
        while meeting.is_alive():
            meeting.join(PERIOD)
            self.check()
        if self._meeting_error is not None:
            raise self._meeting_error
        self._guard.communicator = self.connection
        shutil.rmtree(self._folder, ignore_errors=True)

    def lead(self, runner: Any) -> "Leader":
        """Wait until all ranks are ready; return what computes steps on all of them."""
        for worker in self._workers:
            self._receive(worker)
        self.runner = runner
        return Leader(self, runner.lookahead)

    def send(self, message: bytes) -> None:
        """Tell all workers a step."""
        self.check()
        for worker in self._workers:
            worker.channel.send_bytes(message)

    def check(self) -> None:
        """Raise EngineError if the group is lost."""
        if self._guard.failed.is_set() or self._closed:
            raise EngineError(f"the engine is lost: {self._guard.reason or 'it was closed'}. Make a new one.")

    @contextmanager
    def guarding(self, *, also_interrupts: bool = True) -> Iterator[None]:
        """Close the group if what is done inside fails; tell a worker's failure in place of what follows from it."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                if also_interrupts:
                    self.close()
                raise
            known = isinstance(error, NanoError) or self._closed
            if not known:
                self._guard.failed.wait(VERDICT_SECONDS)
            self.close()
            if known or self._guard.reason is None:
                raise
            raise EngineError(f"the engine is lost: {self._guard.reason}. Make a new one.") from error

    def close(self) -> None:
        """End all workers and give back what the group holds. A second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        if self.device.type == "cuda" and not self._guard.failed.is_set():
            with suppress(RuntimeError):  # while the guard still ends kernels that wait for a lost rank
                torch.cuda.synchronize(self.device)
        if self._guard.is_alive():
            self._guard.stop()
        self.runner = None  # its graphs hold NCCL's resources
        deadline = time.monotonic() + END_SECONDS
        for worker in self._workers:
            worker.end(deadline)
        if self.is_connected:
            self.connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        torch.set_num_threads(self._threads)

    def _meet(self, identity: bytes) -> None:
        try:
            self.join(identity, self._folder / "store")
        except Exception as error:  # noqa: BLE001  raised by who waits for this thread
            self._meeting_error = error

    def _receive(self, worker: Worker) -> bytes:
        while not worker.channel.poll(PERIOD):
            self.check()
        return worker.channel.recv_bytes(2**10)


class Leader:
    """Computes steps on all ranks. Implements ``engine.Runner``; a step that fails on some rank ends the engine."""

    def __init__(self, group: Group, lookahead: int) -> None:
        self.lookahead = lookahead
        self._group = group
        self._describer = Describer()
        weakref.finalize(self, group.close)

    def submit(self, output: SchedulerOutput) -> Fetch:
        """Begin the step on all ranks; return what waits for its tokens."""
        group = self._group
        group.check()
        with _later_interrupts(), group.guarding():
            group.send(self._describer.describe(output))
            wait = group.runner.submit(output)

        def fetch() -> Sequence[Sampled | None]:
            with group.guarding(also_interrupts=False):
                sampled: Sequence[Sampled | None] = wait()
                group.check()
            return sampled

        return fetch


@contextmanager
def _later_interrupts() -> Iterator[None]:
    """Hold back the first Ctrl-C until the end: a step that one rank leaves in the middle is lost on all."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[Any] = []

    def hold(number: int, frame: Any) -> None:
        if held:
            handler(number, frame)
        held.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(signal.SIGINT, held[0])


def _devices(device: torch.device, size: int) -> list[str]:
    """Return the name of each rank's device; raise ConfigError where there are too few."""
    if device.type != "cuda":
        return [device.type] * size
    count, first = torch.cuda.device_count(), torch.cuda.current_device()
    if size > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        raise ConfigError(
            f"tensor_parallel_size is {size}; it must not exceed the number of CUDA devices, and there are {count}"
            f"{limit}. Lower it, or make more devices visible.",
            parameter="tensor_parallel_size", value=size,
        )  # fmt: skip
    if device.index not in (None, first):
        raise ConfigError(
            f"device is {str(device)!r}; with tensor_parallel_size={size} it must be 'cuda'. Choose devices with "
            "CUDA_VISIBLE_DEVICES, or torch.cuda.set_device for the first.",
            parameter="device", value=str(device),
        )  # fmt: skip
    return [f"cuda:{(first + rank) % count}" for rank in range(size)]

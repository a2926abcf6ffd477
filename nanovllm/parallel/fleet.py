"""The processes of ``data_parallel_size``: started together, watched together, lost together.

One that dies, freezes or fails takes the others with it, for its requests are lost, and an engine that went on with the
others would be slower without a word: the caller gets one EngineError, and makes a new engine.
"""

import json
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from nanovllm import errors
from nanovllm.build import cache_blocks
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError
from nanovllm.interrupts import HeldBack
from nanovllm.parallel.guard import PERIOD, VERDICT_SECONDS, Guard, Worker
from nanovllm.parallel.rank import Rank
from nanovllm.parallel.wire import Line, Parts

logger = logging.getLogger(__name__)

REPLICA = "nanovllm.parallel.replica"

END_SECONDS = 5.0
"""For replicas to end by themselves: each ends its own ranks first."""

WRITE_SECONDS = 60.0
"""The same where each writes down what it has recorded, which takes seconds if it is much."""


class Fleet:
    """N processes that have each built an engine.

    Raises, with nothing left: ConfigError before anything starts, what an engine alone would raise for its model,
    EngineError if a process is lost.
    """

    def __init__(self, config: EngineConfig, facts: Any) -> None:
        self.size = config.data_parallel_size
        firsts = first_devices(facts.device, self.size, config.tensor_parallel_size)
        if config.tensor_parallel_size > 1:
            Rank(0, config, facts)  # refuses what cannot be cut
        self._lock = threading.Lock()
        self._closed = False
        self._reason: str | None = None
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")  # of the replicas' own temporary files
        self._workers: list[Worker] = []
        self._lines: list[Line] = []
        self._questions: list[Line] = []  # for what is answered in the middle of a step; who asks holds the lock
        self._asking = threading.RLock()  # a signal may close the engine of the thread that asks
        self._numbers = count()
        self._records = False
        self._guard = Guard(self._workers)
        try:
            for place in range(self.size):
                ours, its = socket.socketpair()
                with ours, its:
                    self._workers.append(Worker(f"replica {place}", REPLICA, its))
                    self._questions.append(Line(Connection(ours.detach())))
            self._guard.start()
            for place, worker in enumerate(self._workers):
                with suppress(OSError):  # that it is gone is said by ``ask``
                    worker.channel.send_bytes(json.dumps(self._hello(config, facts, place, firsts[place])).encode())
                self._lines.append(Line(worker.channel))
            self.num_blocks = min(parts.text["num_blocks"] for parts in self.ask())
            """Of the smallest cache."""
        except BaseException:
            self.close()
            raise
        self._records = config.trace is not None
        shutil.rmtree(self._folder, ignore_errors=True)

    def check(self) -> None:
        """Raise EngineError if the fleet is lost."""
        if self._guard.failed.is_set() or self._closed or self._reason is not None:
            raise self._lost()

    def send(self, place: int, text: Mapping[str, Any], integers: Iterable[int] = ()) -> None:
        """Tell a replica. That it is gone is said by the next ``receive``."""
        with suppress(EOFError):
            self._lines[place].send(text, integers)

    def receive(self, seconds: float, places: Sequence[int] | None = None) -> list[tuple[int, Parts]]:
        """Wait until a replica has said something, at most so long; return what they said, a message of each."""
        self.check()
        lines = self._lines if places is None else [self._lines[place] for place in places]
        ready = set(wait([line.channel for line in lines], seconds))
        came = [(place, line) for place, line in enumerate(self._lines) if line.channel in ready]
        try:
            return [(place, line.receive()) for place, line in came]
        except EOFError as error:
            self._guard.failed.wait(VERDICT_SECONDS)
            self.lose("a replica closed its connection")
            raise self._lost() from error

    def ask(self, text: Mapping[str, Any] | None = None) -> list[Parts]:
        """Tell all replicas, if there is anything to tell; return the answer of each. None of them may be at work."""
        answers: dict[int, Parts] = {}
        for place in range(self.size if text is not None else 0):
            self.send(place, text or {})
        while len(answers) < self.size:
            answers |= self.receive(PERIOD, [place for place in range(self.size) if place not in answers])
            for parts in answers.values():
                _raise_if_refused(parts)
        return [answers[place] for place in range(self.size)]

    def ask_metrics(self) -> list[Any]:
        """Return what each replica says that it has counted. Any thread may ask, and one at a time does.

        Steps go on meanwhile, here and there: questions and answers have connections of their own, so that whoever
        reads outputs reads nothing else.
        """
        with HeldBack() as ctrl_c, self._asking:
            self.check()
            number, answers = next(self._numbers), dict[int, Mapping[str, Any]]()
            for line in self._questions:
                with suppress(EOFError):  # that it is gone is said below
                    line.send({"ask": number})
            while len(answers) < self.size:
                ctrl_c.check()
                self.check()
                answers |= self._answers(number, [place for place in range(self.size) if place not in answers])
        told = [answers[place] for place in range(self.size)]
        for place, answer in enumerate(told):
            if "failed" in answer:
                raise EngineError(f"replica {place} could not say what it has counted: {answer['failed']}.")
        return [answer.get("metrics") for answer in told]

    def _answers(self, number: int, places: Sequence[int]) -> dict[int, Mapping[str, Any]]:
        """Wait a moment; return what has been answered. Answers to a question that was given up are dropped."""
        lines = {self._questions[place].channel: place for place in places}
        try:
            ready = set(wait(list(lines), PERIOD))
            places = [place for channel, place in lines.items() if channel in ready]
            texts = {place: self._questions[place].receive().text for place in places}
            if not all("ask" in text for text in texts.values()):
                raise EngineError(f"replicas answer {texts}, and to no question; they do not run the same code.")
        except (EOFError, OSError) as error:
            if not self._closed:
                self._guard.failed.wait(VERDICT_SECONDS)
                self._reason = self._guard.reason or "a replica closed its connection"
            raise self._lost() from error
        except EngineError as error:
            self._reason = str(error)  # whoever steps next, or closes, ends them all
            raise
        return {place: text for place, text in texts.items() if text["ask"] == number}

    def close(self) -> None:
        """End all processes and give back what they held. A second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        if self._guard.is_alive():
            self._guard.stop()
        deadline = time.monotonic() + (WRITE_SECONDS if self._records else END_SECONDS)
        for worker in self._workers:
            worker.channel.close()
        for worker in self._workers:
            worker.end(deadline, at_once=False)
            if self._records and worker.process.returncode:
                logger.error("%s did not end by itself: what it recorded is lost", worker.name)
        with self._asking:  # the other ends are gone, so whoever asks is told
            for line in self._questions:
                line.channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def lose(self, reason: str) -> None:
        """End all processes because of something that the guard may not see."""
        if not self._closed:
            self._reason = self._guard.reason or self._reason or reason
        self.close()

    def _lost(self) -> EngineError:
        reason = self._reason or self._guard.reason or "it was closed"
        return EngineError(f"the engine is lost: {reason}. Make a new one.")

    def _hello(self, config: EngineConfig, facts: Any, place: int, first: int | None) -> dict[str, Any]:
        """Return what a replica is told first."""
        options = replace(
            config,
            data_parallel_size=1,
            device=facts.device.type,
            use_tqdm_on_load=config.use_tqdm_on_load and place == 0,
        )
        if facts.device.type == "cpu" and config.num_gpu_blocks_override is config.kv_cache_memory_bytes is None:
            options = replace(options, num_gpu_blocks_override=_share(config, facts))
        threads = max(1, torch.get_num_threads() // self.size)
        about = {"threads": threads, "device": first, "folder": self._folder, "replica": place}
        return {"options": asdict(options), **about}


def first_devices(device: torch.device, size: int, ranks: int) -> list[int] | list[None]:
    """Return the number of each replica's first device; raise ConfigError where there are too few."""
    if device.type != "cuda":
        return [None] * size
    count, first = torch.cuda.device_count(), torch.cuda.current_device()
    if size * ranks > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
        raise ConfigError(
            f"data_parallel_size is {size} and tensor_parallel_size {ranks}; their product must not exceed the number "
            f"of CUDA devices, and there are {count}{limit}. Lower one of them, or make more devices visible.",
            parameter="data_parallel_size", value=size,
        )  # fmt: skip
    if device.index not in (None, first):
        raise ConfigError(
            f"device is {str(device)!r}; with data_parallel_size={size} it must be 'cuda'. Choose devices with "
            "CUDA_VISIBLE_DEVICES, or torch.cuda.set_device for the first.",
            parameter="device", value=str(device),
        )  # fmt: skip
    return [(first + place * ranks) % count for place in range(size)]


def _share(config: EngineConfig, facts: Any) -> int:
    """Return a replica's part of the blocks that a CPU has memory for, but no less than one request may need."""
    blocks = cache_blocks(config, facts)
    longest: int = -(-facts.max_model_len // facts.block_size)
    return max(blocks // config.data_parallel_size, min(blocks, longest))


def _raise_if_refused(parts: Parts) -> None:
    if "refused" in parts.text:
        name, message, parameter = parts.text["refused"]
        kind = getattr(errors, name, EngineError)
        raise kind(message, parameter=parameter)

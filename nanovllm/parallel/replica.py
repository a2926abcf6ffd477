"""A replica: a process with a whole engine, from the first message to the end of its channel.

    the user's process                      replica
    add, abort, reset     -- channel -->    a thread takes them, the loop obeys them between two steps
    outputs               <-- channel --    what a step gave out; what was asked for
    ask                   -- questions -->  a thread says at once, also in the middle of a step,
    metrics               <-- questions --  what has been counted

The first thread takes whatever comes at once, so that neither end waits for one that waits for it. torch is imported
late: the thread that ends this process with its parent comes first.
"""

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from nanovllm.engine import LLMEngine
from nanovllm.errors import EngineError, NanoError, RequestError
from nanovllm.interrupts import old_objects_kept
from nanovllm.outputs import RequestOutput
from nanovllm.parallel.messages import read_params
from nanovllm.parallel.wire import Line, Parts, Sheet
from nanovllm.parallel.worker import Life, run

logger = logging.getLogger(__name__)

ABORTS_SECONDS = 0.002
"""How long an abort lets the next step wait: many come one after the other, each when the last one is answered."""


def main() -> None:
    """Serve one engine as a whole."""
    run(serve)


def serve(channel: Connection, hello: dict[str, Any], life: Life) -> None:
    """Build the engine, then compute until the channel ends."""
    import torch

    from nanovllm.build import build
    from nanovllm.checkpoint import find
    from nanovllm.config import EngineConfig, configure_logging
    from nanovllm.llm import TRACE, counter

    life.begin_to_answer()
    configure_logging()
    torch.set_num_threads(hello["threads"])
    if hello["device"] is not None:
        torch.cuda.set_device(hello["device"])
    line = Line(channel)
    config = EngineConfig(**hello["options"])
    if config.tensor_parallel_size > 1:  # what its ranks meet through goes with the parent, whatever happens to us
        tempfile.tempdir = hello["folder"]
    try:
        trace = None if config.trace is None else find(TRACE)(config, hello["replica"])
        built = build(config)
    except NanoError as error:  # the parent raises it for us, and ends us
        line.send({"refused": [type(error).__name__, str(error), error.parameter]})
        line.receive()
        raise
    tempfile.tempdir = None
    metrics = counter(config, built, hello["replica"])
    if trace is not None:
        trace.begin(built.engine, built, config)
    questions = Line(Connection(int(sys.argv[4])))
    Thread(target=answer, args=(questions, metrics, life), name="nanovllm-answers", daemon=True).start()
    try:
        line.send({"num_blocks": built.engine.scheduler.blocks.num_blocks})
        gc.collect()
        with old_objects_kept():
            Server(line, built.engine).run()
    finally:
        built.engine.close()
        built.close()
    os._exit(0)


def answer(questions: Line, metrics: Any, life: Life) -> None:
    """Say what has been counted whenever somebody asks, until the line ends. If it cannot, the process ends."""
    try:
        while True:
            number = questions.receive().text["ask"]
            try:
                told = {"metrics": metrics.tell()}
            except Exception as error:  # the other end waits for an answer, and raises it
                logger.exception("what has been counted cannot be said")
                told = {"failed": f"{type(error).__name__}: {error}"}
            questions.send({"ask": number, **told})
    except EOFError:
        return
    except BaseException as error:  # noqa: BLE001  whoever asks would wait for ever
        life.fail(error)


class Server:
    """Obeys the messages of a line, and sends back what the engine gives out."""

    def __init__(self, line: Line, engine: LLMEngine) -> None:
        self._line, self._engine = line, engine
        self._came: SimpleQueue[bytes | None] = SimpleQueue()
        self._prompt_rows: dict[
            str, int
        ] = {}  # by request: entries of its prompt's log-probabilities the other end has
        Thread(target=self._take, name="nanovllm-messages", daemon=True).start()

    def run(self) -> None:
        """Serve until the line ends."""
        try:
            while self._obey():
                self._step()
        except EOFError:
            return

    def _take(self) -> None:
        try:
            while True:
                self._came.put(self._line.receive_bytes())
        except EOFError:
            self._came.put(None)

    def _obey(self) -> bool:
        """Do what has been asked for, and wait while there is nothing to do; False: the line has ended."""
        wait = 0.0
        while True:
            try:
                idle = not self._engine.has_unfinished_requests
                message = self._came.get() if idle else self._came.get(wait > 0.0, wait)
            except Empty:
                return True
            if message is None:
                return False
            wait = self._do(self._line.unpack(message))

    def _do(self, parts: Parts) -> float:
        """Do one thing; return how long to wait for another one before the next step."""
        text, wait = parts.text, 0.0
        if "add" in text:
            self._add(parts)
        elif "abort" in text:
            output = self._engine.abort(str(text["abort"]))
            self._send([output] if output else [])
            wait = ABORTS_SECONDS
        else:
            self._line.send({"reset": self._engine.scheduler.blocks.reset_prefix_cache()})
        parts.check_all_is_read()
        return wait

    def _add(self, parts: Parts) -> None:
        asked = parts.text["add"]
        tokens, about = list(parts.integers(asked["tokens"])), asked["about"]
        try:
            request = self._engine.add_request(str(asked["key"]), tokens, read_params(asked["params"]), **about)
        except RequestError as error:  # the other end would not have sent it: a grammar that compiled there in time
            self._line.send({"refuse": asked["key"], "why": str(error)})
        else:
            for sample in self._engine._requests[request.request_id]:  # it waits since then, and not since now
                sample.metrics.queued_ts, sample.metrics.arrival_time = asked["came"]
            if request.prompt_logprobs is not None:
                self._prompt_rows[request.request_id] = len(request.prompt_logprobs)

    def _step(self) -> None:
        try:
            self._send(self._engine.step())
        except EngineError as error:
            if isinstance(error.__cause__, EngineError):  # it is lost with one of its ranks, and so are we
                raise error.__cause__ from None
            self._send(error.outputs, str(error))

    def _send(self, outputs: Sequence[RequestOutput], failure: str | None = None) -> None:
        """Send outputs, and why a step failed; nothing if there are none."""
        if not outputs and failure is None:
            return
        sheet = Sheet()
        written = []
        for output in outputs:
            rows, known = 0, self._prompt_rows.get(output.request_id)
            if known is not None:
                rows = len(output.prompt_logprobs or ()) - known
                self._prompt_rows[output.request_id] = known + rows
            written.append(sheet.write(output, rows))
            if output.finished:
                self._prompt_rows.pop(output.request_id, None)
        self._line.send({"outputs": written, "failure": failure}, sheet.integers, sheet.numbers)

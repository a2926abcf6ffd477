"""A rank other than 0: its process, from the first message to the end of its channel.

torch is imported late: the thread that ends this process with its parent comes first.
"""

import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

MESSAGE_BYTES = 2**30
"""Longest message that is read."""


class Life:
    """The connection on which the parent asks for a sign of life. When it ends so does this process, whatever it does.

    It answers from ``begin_to_answer`` on: while torch is being imported no other thread may run for seconds.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._answers = threading.Event()
        threading.Thread(target=self._answer, name="nanovllm-life", daemon=True).start()

    def begin_to_answer(self) -> None:
        """Answer from now on."""
        self._answers.set()

    def fail(self, error: BaseException) -> NoReturn:
        """Say why this process ends, and end it."""
        self._socket.sendall(f"!{type(error).__name__}: {error}"[:2000].encode())
        os._exit(1)

    def _answer(self) -> None:
        try:
            while self._socket.recv(64):
                if self._answers.is_set():
                    self._socket.sendall(b".")
        finally:
            os._exit(0)


def main() -> None:
    """Serve one engine as a rank of it."""
    run(serve)


def run(serve: Callable[[Connection, dict[str, Any], Life], None]) -> None:
    """Serve one engine, from its first message on; the process's arguments are what ``guard.Worker`` passes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel, life = Connection(int(sys.argv[2])), Life(int(sys.argv[3]))
    try:
        serve(channel, json.loads(channel.recv_bytes(MESSAGE_BYTES)), life)
    except EOFError:  # the parent closed the engine
        os._exit(0)
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent must know
        life.fail(error)


def serve(channel: Connection, hello: dict[str, Any], life: Life) -> None:
    """Build this rank's part of the engine, then compute steps until the channel ends."""
    import torch

    from nanovllm.build import build_runner, matchers, open_tokenizer, plan
    from nanovllm.checkpoint import open_checkpoint
    from nanovllm.config import EngineConfig, configure_logging
    from nanovllm.interrupts import old_objects_kept
    from nanovllm.parallel.messages import Mirror
    from nanovllm.parallel.rank import Rank
    from nanovllm.tokenizer import end_ids

    life.begin_to_answer()
    configure_logging()
    torch.set_num_threads(hello["threads"])
    config = EngineConfig(**hello["options"])
    if config.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(config.device))

    class Member(Rank):
        def connect(self) -> None:
            channel.send_bytes(b"loaded")
            self.join(channel.recv_bytes(MESSAGE_BYTES), Path(hello["store"]))

    checkpoint = open_checkpoint(
        config.model, revision=config.revision, download_dir=config.download_dir, token=config.hf_token
    )
    facts = plan(config, checkpoint)
    runner, _ = build_runner(config, checkpoint, facts, Member(hello["rank"], config, facts))

    def grammars() -> Any:
        tokenizer = open_tokenizer(config, checkpoint)
        assert tokenizer is not None, "rank 0 has one, or it would have refused"
        return matchers(tokenizer, end_ids(facts.model, checkpoint.generation_config, tokenizer))

    mirror = Mirror(grammars)
    channel.send_bytes(b"ready")
    gc.collect()
    with old_objects_kept():
        while True:
            runner.submit(mirror.read(channel.recv_bytes(MESSAGE_BYTES)))

"""The files of ``LLM(..., trace=...)``: checked before a model is loaded, written when the engine is closed."""

import json
import logging
import os
import platform
import weakref
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from nanovllm.build import Built
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.trace.live import Live
from nanovllm.trace.perfetto import MARK, chrome_trace
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.recording import PAGE, PLAIN, Recording, dump, of_replica, replace
from nanovllm.trace.texts import text_of

logger = logging.getLogger(__name__)

RENDER = "nanovllm.trace.page"
"""What makes a page of a recording; it is imported when there is one to make."""


def open_trace(config: EngineConfig, replica: int | None = None) -> "TraceFile | None":
    """Return what records the engine of ``config``, or the ``replica`` of another engine that it is.

    With ``data_parallel_size`` above 1: None, once it is known that all can be written, for each replica records itself
    in its own process. Raises ConfigError as ``TraceFile`` does.
    """
    size, path = config.data_parallel_size, config.trace
    if size == 1:
        return TraceFile(path if path is None or replica is None else of_replica(path, replica), config.live)
    if config.live is not None:
        raise ConfigError(
            f"live needs data_parallel_size=1, not {size}: its page shows the steps of one engine, and each replica "
            "computes its own in another process. Take trace=, which writes a page for each replica, or get_metrics().",
            parameter="live", value=config.live,
        )  # fmt: skip
    for place in range(size if path is not None else 0):
        TraceFile(of_replica(str(path), place))
    return None


class TraceFile:
    """The files of one trace. ``run.html`` brings ``run.json`` with it, ``run.recording.json`` stands alone.

    With a ``port``, the page is served there too while the engine runs; see ``live``.

    Raises ConfigError if they could not be written: another ending, a folder that is missing or may not be written to,
    a ``run.json`` that is something else; or if the port is taken.
    """

    def __init__(self, path: str | None, port: int | None = None) -> None:
        self.path: Path | None = None
        self.beside: Path | None = None
        """Where the Chrome trace goes."""
        if path is not None:
            self._check(path)
        self.live = None if port is None else Live(port)

    def _check(self, path: str) -> None:
        target = Path(path).expanduser()
        if target.is_dir():
            _refuse(path, f"must be a file, and this is a folder; try {str(target / 'run.html')!r}")
        if not target.name.endswith((PAGE, PLAIN)) or target.name in (PAGE, PLAIN):
            _refuse(path, "must end in .html, for a page and a Chrome trace beside it, or in .recording.json")
        folder = target.absolute().parent
        if not folder.is_dir():
            _refuse(path, f"must lie in a folder that exists, and {folder} does not; make it first")
        if not os.access(folder, os.W_OK):
            _refuse(path, f"must lie in a folder that may be written to, and {folder} may not; take another one")
        self.path = target.absolute()
        self.beside = self.path.with_suffix(".json") if target.name.endswith(PAGE) else None
        if self.beside is not None and not _ours(self.beside):
            _refuse(path, f"brings {self.beside} with it, and there is another file of that name; take another name")

    def begin(self, owner: object, built: Built, config: EngineConfig) -> None:
        """Record from now on, until the engine is closed or ``owner`` is gone."""
        facts = built.plan
        device = facts.device.type
        recorder = Recorder(
            built.engine,
            facts={
                "nanovllm": _version(),
                "model": Path(config.model).name if Path(config.model).exists() else config.model,
                "device": device,
                "device_name": _device_name(facts.device),
                "dtype": str(facts.dtype).removeprefix("torch."),
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": facts.max_num_batched_tokens,
                "policy": config.scheduling_policy,
            },
            decode=None if built.tokenizer is None else partial(text_of, built.tokenizer),
            deliver=self.end,
            candidates=config.logprobs_mode.endswith("logprobs"),
        )
        built.engine.observers.append(recorder)
        if self.live is not None:
            self.live.begin(recorder)
        weakref.finalize(owner, recorder.close)

    def cancel(self) -> None:
        """Give back the port: no engine came."""
        if self.live is not None:
            self.live.close()

    def end(self, recorder: Recorder) -> None:
        """Let viewers go, and write the files if there are any to write."""
        if self.live is not None:
            self.live.close()
        if self.path is not None:
            self.write(self.path, recorder.recording())

    def write(self, path: Path, recording: Recording) -> None:
        """Write all files, each whole or not at all. A failure is an error in the log: results must not be lost."""
        try:
            if self.beside is None:
                replace(path, dump(recording))
            else:
                replace(path, import_module(RENDER).render(recording))
                replace(self.beside, json.dumps(chrome_trace(recording), separators=(",", ":")))
        except Exception as error:  # whatever it is, the engine's owner has results to take home
            logger.exception(
                "the trace could not be written to %s (%s); the results are not touched by it. Give trace= another "
                "place and run again.", path, error,
            )  # fmt: skip
        else:
            logger.info("the trace of %d steps is in %s", len(recording["steps"]), path)


def _ours(path: Path) -> bool:
    """Whether nothing is lost when a Chrome trace is written there."""
    if not path.exists():
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(200).startswith(MARK.encode())


def _device_name(device: Any) -> str:
    if device.type != "cuda":
        return platform.processor() or platform.machine()
    import torch

    return str(torch.cuda.get_device_name(device))


def _version() -> str:
    try:
        return version("nanovllm")
    except PackageNotFoundError:  # it runs from its source folder
        return "unknown"


def _refuse(path: str, rule: str) -> NoReturn:
    raise ConfigError(f"trace is {path!r}; it {rule}.", parameter="trace", value=path)

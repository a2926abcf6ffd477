"""Opening an engine for a command, with the time it took and a word about downloads."""

import argparse
import logging
import sys
import time
from dataclasses import dataclass

from nanovllm import LLM
from nanovllm.cli.arguments import engine_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """An engine that is ready."""

    llm: LLM
    import_seconds: float
    """From the start of the command until Python had imported the engine."""
    load_seconds: float
    """From there until the model could answer, with the download if there was one."""


def open_llm(args: argparse.Namespace) -> Loaded:
    """Load the model that ``args`` name. The caller closes it."""
    imported = time.perf_counter()
    show_downloads()
    llm = LLM(args.model, **{"use_tqdm_on_load": wants_progress(args)} | engine_options(args))
    return Loaded(llm=llm, import_seconds=imported - args.started, load_seconds=time.perf_counter() - imported)


def wants_progress(args: argparse.Namespace) -> bool:
    """Whether to draw progress bars: on a terminal, unless the user wants the answers alone."""
    return sys.stderr.isatty() and not (getattr(args, "quiet", False) or getattr(args, "json", False))


def show_downloads() -> None:
    """Let the hub say on standard error that it fetches a model: it can take minutes."""
    hub = logging.getLogger("nanovllm.hub")
    if not hub.hasHandlers():
        hub.addHandler(logging.StreamHandler())
        hub.setLevel(logging.INFO)
        hub.propagate = False

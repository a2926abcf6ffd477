"""The command ``nanovllm``: generate, chat, trace, page, explain, top, info, bench and profile in a terminal.

This file reads the arguments; each command is a module that is imported when it is run, because torch takes
a second or two to import and ``--help`` should not.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from nanovllm.cli.arguments import (
    add_bench,
    add_chat,
    add_explain,
    add_generate,
    add_info,
    add_page,
    add_profile,
    add_top,
    add_trace,
)
from nanovllm.errors import NanoError
from nanovllm.interrupts import HeldBack

COMMANDS = {
    "generate": "nanovllm.cli.generate:run",
    "chat": "nanovllm.cli.chat:run",
    "trace": "nanovllm.cli.trace:run",
    "page": "nanovllm.trace.convert:run",
    "explain": "nanovllm.trace.explain:run",
    "top": "nanovllm.trace.top:run",
    "info": "nanovllm.cli.info:run",
    "bench": "nanovllm.cli.bench:run",
    "profile": "nanovllm.cli.profile:run",
}
"""Where each command is; one may be another room's."""

FAILED, BAD_INPUT, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
"""Exit statuses: argparse's own for bad input, and what a shell reports for SIGINT and for SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``argv`` defaults to the arguments of the process."""
    started = time.perf_counter()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started us has closed it
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  it is there until the end
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # in the C locale Python would let bytes pass that are no text
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what this terminal cannot show
    args = _parser().parse_args(argv)
    args.started = started
    try:
        with HeldBack():  # a module that is being imported may take Ctrl-C for a reason of its own, and go on
            run = _find(args.command)
        status = run(args)
        sys.stdout.flush()  # here, and not at exit, where a closed pipe could no longer be caught
        return status
    except NanoError as error:
        print(f"nanovllm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left (``| head``)
        _let_go_of_output()
        return PIPE_CLOSED
    except OSError as error:  # the disk below standard output is full, for one
        print(f"nanovllm: error: {error}", file=sys.stderr)
        _let_go_of_output()
        return FAILED


def _let_go_of_output() -> None:
    """Let what is left go nowhere: Python would complain once more at exit, when it flushes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _find(command: str) -> Callable[[argparse.Namespace], int]:
    """Import the module of ``command`` and return its ``run``."""
    module, name = COMMANDS[command].split(":")
    run: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanovllm",
        description="Run language models: a complete, small inference engine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_generate, add_chat, add_trace, add_page, add_explain, add_top, add_info, add_bench, add_profile):
        add(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version. argparse's own action would read the package's metadata on every start."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> NoReturn:
        try:
            found = version("nanovllm")
        except PackageNotFoundError:
            found = "(not installed: run from its source folder)"
        print(f"nanovllm {found}")
        parser.exit()

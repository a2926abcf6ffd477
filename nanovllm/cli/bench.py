"""``nanovllm bench``: how fast this machine answers, and how fast it could.

First the gate: a wrong answer has no speed. Then what the machine can do at best, as measured; then one line for each
figure as it is found, with the floor that follows from the model's bytes; the last line is JSON. A row that fails says
so in its line, the others go on, and the exit status is 1. Ctrl-C ends with what has been found so far.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nanovllm.cli.arguments import engine_options
from nanovllm.cli.gate import gate
from nanovllm.cli.opening import show_downloads
from nanovllm.cli.roofline import device_name
from nanovllm.cli.rows import DEFAULT_SCALE, DEFAULT_SHAPE, PEERS, PEERS_SOURCE, SWEEP, Row, Sizes, select
from nanovllm.cli.timing import KINDS, Figure, Session
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError

logger = logging.getLogger(__name__)

SOME_FAILED, INTERRUPTED = 1, 130
"""Exit statuses: a row has no figure; what a shell reports for SIGINT."""
ERROR_CHARS = 200
"""Most of an error's text that is shown; NANOVLLM_LOG_LEVEL=INFO shows where it came from."""


def run(args: argparse.Namespace) -> int:
    """Time the rows, print the table and one line of JSON."""
    started = time.perf_counter()
    options = engine_options(args)
    EngineConfig.from_options("", options)  # an option that no engine has is no failure of a row
    kind = device_type(options)
    rows = select(args.rows, sweep=args.sweep, device=kind, own_model=args.model is not None)
    scale = DEFAULT_SCALE[kind] if args.scale is None else args.scale
    sizes = Sizes(scale=scale, num_requests=args.num_requests, min_len=args.min_len, max_len=args.max_len)
    if sizes.lengths[0] > sizes.lengths[1]:
        raise ConfigError(
            f"--min-len is {sizes.lengths[0]} and --max-len {sizes.lengths[1]}; the first must not be greater. "
            "Swap them, or give both."
        )
    show_downloads()
    compared = gate(options)
    shape = DEFAULT_SHAPE[kind]
    say: Callable[[str], None] = silence if args.json_only else tell
    with Session(args.model, shape, options, sizes) as session:
        name, roof = device_name(session.plan.device), session.roof
        usual = args.model is None and kind == "cuda" and sizes == Sizes()
        peers = PEERS if usual and "H200" in name else {}
        say(f"{args.model or f'shapes of {shape}'} on {name}, torch {torch.__version__}, scale {scale:g}")
        say(f"gate passed: {', '.join(compared)}")
        say(f"a copy moves {roof.bytes_per_second / 1e9:,.0f} GB/s, a product of matrices makes "
            f"{roof.flops_per_second / 1e12:,.2f} TFLOP/s; the floor follows from both\n")  # fmt: skip
        say(as_line("figure", "value", "unit", "floor", "of it", PEERS_SOURCE if peers else "", ""))
        figures, errors, interrupted = measure(session, rows, say, peers)
    summary: dict[str, Any] = {
        "bench": "nanovllm",
        "model": args.model or shape,
        "device": name,
        "torch": torch.__version__,
        "scale": scale,
        "options": options,
        "gate": compared,
        "copy_bytes_per_second": round(roof.bytes_per_second),
        "product_flops_per_second": round(roof.flops_per_second),
        "figures": {figure.name: as_json(figure) for figure in figures},
        "errors": errors,
        "interrupted": interrupted,
        "seconds": round(time.perf_counter() - started, 2),
    }
    if args.sweep:
        summary["sweep"] = [as_point(figure) for figure in figures if figure.name in SWEEP]
    say("")
    print(json.dumps(summary))
    return INTERRUPTED if interrupted else SOME_FAILED if errors else 0


def measure(
    session: Session, rows: Mapping[str, Row], say: Callable[[str], None], peers: Mapping[str, str]
) -> tuple[list[Figure], dict[str, str], bool]:
    """Time each row and say its figures as they come; return them, the errors by row, and whether Ctrl-C came."""
    figures: list[Figure] = []
    errors: dict[str, str] = {}
    try:
        for name, row in rows.items():
            try:
                for figure in KINDS[row.kind](session, name, row):
                    figures.append(figure)
                    say(shown(figure, peers))
            except Exception as error:  # whatever one row dies of, the others are still wanted
                logger.info("row %s", name, exc_info=True)
                errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:ERROR_CHARS]}"
                say(f"{name:<16} failed: {errors[name]}")
            if name in errors:  # out here nothing holds the engine any more
                session.close_engine()
    except KeyboardInterrupt:
        return figures, errors, True
    return figures, errors, False


def tell(line: str) -> None:
    """Print at once, so that what has been found is seen whatever happens next."""
    print(line, flush=True)


def silence(line: str) -> None:
    """Print nothing: the JSON says it all."""


def device_type(options: Mapping[str, Any]) -> str:
    """Return the kind of device that is asked for, ``cuda`` or ``cpu``, as far as defaults depend on it."""
    asked = str(options.get("device", "auto")).partition(":")[0]
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    return asked if asked in DEFAULT_SHAPE else "cpu"


def as_line(*cells: str) -> str:
    """Lay out the cells of one line of the table."""
    name, value, unit, floor, share, peer, note = cells
    line = f"{name:<16} {value:>11} {unit:<8} {floor:>11} {share:>6}"
    return f"{line}  {peer:>{len(PEERS_SOURCE)}}  {note}".rstrip() if peer else f"{line}  {note}".rstrip()


def shown(figure: Figure, peers: Mapping[str, str]) -> str:
    """Return a figure as a line of the table."""
    share = "" if figure.share is None else f"{figure.share:.0%}"
    peer = peers.get(figure.name, "-") if peers else ""
    return as_line(figure.name, number(figure.value), figure.unit, number(figure.floor), share, peer, figure.note)


def number(value: float | None) -> str:
    """Write a number with about four digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def as_json(figure: Figure) -> dict[str, Any]:
    """Return a figure with everything that is known of it."""
    facts = {"value": figure.value, "unit": figure.unit, "floor": figure.floor, "share": figure.share}
    return facts | dict(figure.counts) | {"note": figure.note}


def as_point(figure: Figure) -> dict[str, float | None]:
    """Return one batch size of a sweep, as docs/figures/throughput.py draws it."""
    batch_size = figure.counts["batch_size"]
    return {
        "batch_size": batch_size,
        "tokens_per_second": batch_size / figure.value * 1e3,
        "ms_per_step": figure.value,
        "floor_ms_per_step": figure.floor,
    }

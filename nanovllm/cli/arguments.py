"""The arguments of each command, and how they become options of the engine and sampling parameters.

An option that is not given is not passed on, so the defaults are those of the Python API, written there once.
"""

import argparse
import json
from typing import Any, TypeAlias

from nanovllm.cli.rows import GROUPS, ROWS

DEFAULT_MODEL = "smollm2-135m-instruct"

ENGINE = {
    "dtype": str, "device": str, "max_model_len": int, "max_num_seqs": int, "load_format": str,
    "tensor_parallel_size": int, "data_parallel_size": int,
}  # fmt: skip
"""Options of the engine that have an argument of their own; ``-o`` reaches all of them."""

SAMPLING = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "seed": int}
"""Sampling parameters that have an argument of their own, beside ``--stop``."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_generate(commands: Commands) -> None:
    """Add ``nanovllm generate``."""
    parser = _command(commands, "generate", "answer prompts: those given, else those on standard input, one a line")
    _add_prompts(parser)
    _add_recording(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quiet", action="store_true", help="print the answers and nothing else")
    form.add_argument("--json", action="store_true", help="print one JSON object a line for each prompt")


def add_chat(commands: Commands) -> None:
    """Add ``nanovllm chat``."""
    parser = _command(commands, "chat", "talk with a model in the terminal")
    _add_model(parser)
    _add_sampling(parser)
    _add_recording(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the system message says")
    # A conversation wants longer answers than the API's 64 tokens, and small models ramble at temperature 1.
    parser.set_defaults(max_tokens=512, temperature=0.6)


def add_trace(commands: Commands) -> None:
    """Add ``nanovllm trace``."""
    parser = _command(commands, "trace", "answer prompts, and write down every step: a page to watch it on")
    _add_prompts(parser, output=True)
    parser.add_argument(
        "--output", dest="trace", default="run.html", metavar="FILE",
        help=f"{RECORDING_HELP}; default: %(default)s; -o FILE is the same",
    )  # fmt: skip
    parser.add_argument(
        "--alternatives", type=_few, default=5, metavar="N",
        help="tokens that might have come instead, 1 to 20, to be shown with their probabilities; default: %(default)s",
    )  # fmt: skip


def add_page(commands: Commands) -> None:
    """Add ``nanovllm page``."""
    parser = _command(commands, "page", "make the page to watch a recording on")
    parser.add_argument("file", metavar="FILE", help="a .recording.json, as trace wrote it, or another page")
    parser.add_argument("-o", "--output", default="run.html", metavar="FILE", help="default: %(default)s")


def add_explain(commands: Commands) -> None:
    """Add ``nanovllm explain``."""
    parser = _command(commands, "explain", "say what became of a request, and where its time went")
    parser.add_argument("file", metavar="FILE", help="a page or a .recording.json, as trace wrote it")
    parser.add_argument("request", nargs="?", metavar="REQUEST", help="its id; without it: a table of all")


def add_top(commands: Commands) -> None:
    """Add ``nanovllm top``."""
    parser = _command(commands, "top", "show what an engine that was started with --live is doing")
    parser.add_argument("port", type=_port, metavar="PORT", help="of this machine, as --live or live= named it")


def add_info(commands: Commands) -> None:
    """Add ``nanovllm info``."""
    parser = _command(commands, "info", "say what a model is and what fits beside it, without loading its weights")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)
    _add_engine(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_bench(commands: Commands) -> None:
    """Add ``nanovllm bench``."""
    parser = _command(commands, "bench", "time this machine row by row, and say how far it is from its floor")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "rows:\n" + "\n".join(f"  {name:<12} {row.about}" for name, row in ROWS.items())
    parser.add_argument(
        "--model", "-m", metavar="MODEL",
        help="a folder, a .gguf file, a built-in name or a hub name like owner/name; default: random weights in the "
        "shapes of Qwen3-0.6B on a GPU, of a small model on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=_names, metavar="NAME,...", help=f"default: all; {', '.join(GROUPS)} stands for several"
    )
    parser.add_argument("--sweep", action="store_true", help="time steps of 1 to 256 requests, for a plot")
    parser.add_argument(
        "--scale", type=_above_zero, metavar="X",
        help="multiplies the lengths, and the number of requests of all but the batch rows; default: 1 on a GPU, "
        "1/16 on a CPU",
    )  # fmt: skip
    group = parser.add_argument_group("main workload", "instead of what --scale makes of it")
    group.add_argument("--num-requests", type=_positive, metavar="N", help="256 at scale 1")
    group.add_argument("--min-len", type=_positive, metavar="N", help="shortest prompt and output; 100 at scale 1")
    group.add_argument("--max-len", type=_positive, metavar="N", help="longest prompt and output; 1024 at scale 1")
    _add_recording(parser, "; each engine after the first writes its own, run-2.html and so on")
    parser.add_argument("--json-only", action="store_true", help="print the line of JSON and nothing else")
    _add_engine(parser)


def add_profile(commands: Commands) -> None:
    """Add ``nanovllm profile``."""
    parser = _command(commands, "profile", "say where the time of a step goes, and write a trace")
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="what to answer, instead of a row's random tokens; needs a model"
    )
    parser.add_argument(
        "--model", "-m", metavar="MODEL",
        help="a folder, a .gguf file, a built-in name or a hub name like owner/name; default: random weights in the "
        f"shapes of Qwen3-0.6B on a GPU, of a small model on a CPU; with prompts {DEFAULT_MODEL}",
    )  # fmt: skip
    parser.add_argument("--row", default="batch8", metavar="NAME", help="a row of nanovllm bench; default: %(default)s")
    parser.add_argument(
        "--scale", type=_above_zero, metavar="X", help="as for nanovllm bench; default: 1 on a GPU, 1/16 on a CPU"
    )
    parser.add_argument(
        "--steps", type=_positive, default=16, metavar="N", help="steps to record; default: %(default)s"
    )
    parser.add_argument(
        "--from-start", action="store_true",
        help="record the first steps, in which prompts are computed; default: once every request decodes",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="write a trace for Perfetto or TensorBoard: .json or .json.gz")
    parser.add_argument("--json-only", action="store_true", help="print the line of JSON and nothing else")
    _add_engine(parser)


RECORDING_HELP = "a .html, which brings a .json for viewers of Chrome traces with it, or a .recording.json"
MODEL_HELP = "a folder, a .gguf file, a built-in name or a hub name like owner/name; default: %(default)s"


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the user said about the engine, as keyword arguments of ``LLM``."""
    given = {name: value for name in [*ENGINE, "trace", "live"] if (value := getattr(args, name, None)) is not None}
    return given | dict(args.options)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the user said about sampling, as keyword arguments of ``SamplingParams``."""
    return {name: value for name in [*SAMPLING, "stop"] if (value := getattr(args, name)) is not None}


def _command(commands: Commands, name: str, purpose: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False
    )
    return parser


def _add_model(parser: argparse.ArgumentParser, *, output: bool = False) -> None:
    parser.add_argument("--model", "-m", default=DEFAULT_MODEL, metavar="MODEL", help=MODEL_HELP)
    _add_engine(parser, output=output)


def _add_prompts(parser: argparse.ArgumentParser, *, output: bool = False) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="a prompt; standard input is read if there is none"
    )
    _add_model(parser, output=output)
    _add_sampling(parser)
    parser.add_argument("--chat", action="store_true", help="each prompt is what a user says: use the chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what the system message says")


def _add_recording(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--trace", metavar="FILE", help=f"write down every step: {RECORDING_HELP}{more}")
    parser.add_argument(
        "--live",
        type=_port,
        metavar="PORT",
        help="show every step in a browser at this port while it runs; 0: any port",
    )


def _add_engine(parser: argparse.ArgumentParser, *, output: bool = False) -> None:
    group = parser.add_argument_group("engine")
    for name, kind in ENGINE.items():
        group.add_argument(_flag(name), type=kind, metavar=_letter(kind))
    group.add_argument(
        "-o", dest="options", action="append", default=[], type=_option_or_file if output else _option,
        metavar="NAME=VALUE",
        help="any option of LLM(model, ...); the value is read as JSON where it is JSON, else as text",
    )  # fmt: skip


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind in SAMPLING.items():
        group.add_argument(_flag(name), type=kind, metavar=_letter(kind))
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end an answer before this text; may be repeated"
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _letter(kind: type) -> str:
    return {int: "N", float: "X", str: "NAME"}[kind]


def _positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _few(text: str) -> int:
    """Read a whole number of 1 to 20: a recording holds no more candidates."""
    if not text.isdecimal() or not 1 <= int(text) <= 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 to 20")
    return int(text)


def _above_zero(text: str) -> float:
    """Read a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _names(text: str) -> list[str]:
    """Read names with commas between them."""
    return [name for part in text.split(",") if (name := part.strip())]


def _port(text: str) -> int:
    """Read a port."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def _option(text: str) -> tuple[str, Any]:
    """Read ``name=value``. ``true``, ``null``, numbers and quoted text are JSON; ``cpu`` is text."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} must look like name=value")
    if name == "model":
        raise argparse.ArgumentTypeError("the model is no option of this kind; see MODEL above")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def _option_or_file(text: str) -> tuple[str, Any]:
    """Read ``name=value``, or the name of a file: where the recording goes."""
    return _option(text) if "=" in text else ("trace", text)

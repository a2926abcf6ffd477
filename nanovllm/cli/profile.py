"""``nanovllm profile``: where the time of a step goes, against the least that its work can take.

The same steps are run three times: to warm up, on the clock, and under PyTorch's profiler, which slows them down. What
it saw is sorted by what it is for (``classes``); on a GPU the rest is time in which the device had nothing to do, on a
CPU time between operators. The floor of products and of attention follows from their bytes, as in ``nanovllm bench``.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.cli.arguments import DEFAULT_MODEL, engine_options
from nanovllm.cli.bench import device_type, silence, tell
from nanovllm.cli.classes import CLASSES, kernel_class, operator_class
from nanovllm.cli.opening import show_downloads
from nanovllm.cli.roofline import device_name
from nanovllm.cli.rows import DEFAULT_SCALE, DEFAULT_SHAPE, ROWS, Sizes, select
from nanovllm.cli.timing import TEMPERATURE, Session
from nanovllm.cli.trace import NOT_WRITTEN, stamp
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError
from nanovllm.scheduler import SchedulerOutput

SETTLED_TOKENS = 3
"""How many tokens each request has before decodes are recorded."""
TRACES = (".json", ".json.gz")

Spans = list[tuple[int, int, bool]]


class Decisions:
    """Writes down the spans of each step. Implements ``Observer``."""

    def __init__(self) -> None:
        self.steps: list[Spans] = []

    def on_decision(self, output: SchedulerOutput) -> None:
        """Keep the spans, as numbers."""
        if output.spans:
            self.steps.append([(span.start, span.stop, span.samples) for span in output.spans])

    def on_arrival(self, request: Any) -> None:
        """Nothing to keep."""

    def on_step(self, output: Any, times: Any) -> None:
        """Nothing to keep."""

    def on_failure(self, output: Any, error: Exception) -> None:
        """Nothing to keep."""

    def on_end(self, request: Any) -> None:
        """Nothing to keep."""

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one class takes, in milliseconds and calls of a step."""

    name: str
    milliseconds: float
    calls: float
    floor: float | None = None


def run(args: argparse.Namespace) -> int:
    """Profile one workload; print the table and one line of JSON. Status 1 if there is no trace, and should be."""
    options = engine_options(args)
    EngineConfig.from_options("", options)
    target = None if args.output is None else check_target(args.output)
    model = args.model or (DEFAULT_MODEL if args.prompts else None)
    kind = device_type(options)
    rows = select([args.row], device=kind, own_model=model is not None)
    if len(rows) != 1 or ROWS[args.row].kind == "start":
        raise ConfigError(
            f"--row is {args.row!r}; it must be one row with an engine. Name another one.", parameter="row"
        )
    row = rows[args.row]
    say = silence if args.json_only else tell
    show_downloads()
    sizes = Sizes(scale=DEFAULT_SCALE[kind] if args.scale is None else args.scale)
    with Session(model, DEFAULT_SHAPE[kind], options, sizes) as session:
        llm, load = session.engine(row), session.load(row)
        prompts, shared = [list(prompt) for prompt in load.prompts], load.shared
        if args.prompts:
            prompts, shared = [list(llm.encode(prompt)[1]) for prompt in args.prompts], 0
        from_start = args.from_start or row.kind == "prefill"
        walk(llm, prompts, args.steps, from_start, nullcontext())
        plain, _ = walk(llm, prompts, args.steps, from_start, nullcontext())
        device = session.plan.device
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities):
            pass  # the first one of a process sets things up
        recorded = profile(activities=activities)
        seconds, steps = walk(llm, prompts, args.steps, from_start, recorded)
        products, attention = session.costs(row, llm).steps(steps, shared)
        number = len(steps)
        floors = {"linear": products.seconds(session.roof), "attention": attention.seconds(session.roof)}
        taken = kernel_times(recorded) if device.type == "cuda" else operator_times(recorded)
        parts = as_parts(taken, seconds, number, floors, "idle" if device.type == "cuda" else "between operators")
        what = f"{len(args.prompts)} prompt{'s' * (len(args.prompts) > 1)}" if args.prompts else f"row {args.row}"
        name = device_name(device)
        say(f"{model or f'shapes of {DEFAULT_SHAPE[kind]}'} on {name}, torch {torch.__version__}: {what}")
        requests, tokens = (sum(map(count, steps)) / number for count in (len, num_tokens))
        say(f"{number} steps of {requests:.4g} requests and {tokens:.4g} tokens\n")
    for line in table(parts, seconds / number * 1e3, sum(floors.values()) / number * 1e3):
        say(line)
    say(f"\nwithout the profiler a step takes {plain / number * 1e3:.3f} ms")
    written = target is None or write_trace(recorded, target)
    if target is not None and written:
        say(f"trace written to {target}; ui.perfetto.dev and TensorBoard open it")
    print(json.dumps({
        "profile": "nanovllm", "model": model or DEFAULT_SHAPE[kind], "device": name, "torch": torch.__version__,
        "steps": number, "requests": requests, "tokens": tokens,
        "ms_per_step": seconds / number * 1e3, "plain_ms_per_step": plain / number * 1e3,
        "floor_ms_per_step": sum(floors.values()) / number * 1e3,
        "parts": {part.name: {"ms": part.milliseconds, "calls": part.calls, "floor_ms": part.floor} for part in parts},
        "trace": str(target) if target is not None and written else None,
    }))  # fmt: skip
    return 0 if written else NOT_WRITTEN


def check_target(name: str) -> Path:
    """Return where the trace goes. Raises ConfigError, before anything has run, if it cannot be written there."""
    path = Path(name).expanduser()
    obstacle = ""
    if not path.name.endswith(TRACES):
        obstacle = f"it must end in {' or '.join(TRACES)}"
    elif path.is_dir():
        obstacle = "this is a folder; name a file in it"
    elif not path.parent.is_dir():
        obstacle = f"there is no folder {path.parent}; make it first"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        obstacle = "nothing can be written there; name another place"
    if obstacle:
        raise ConfigError(f"--output is {name!r}; {obstacle}.", parameter="output", value=name)
    return path


def write_trace(recorded: profile, target: Path) -> bool:
    """Write what was recorded, as a whole or not at all; return whether it is there, and say so if it is not.

    PyTorch only logs that it could not write, and leaves what it has written so far.
    """
    before = stamp(target)
    try:
        recorded.export_chrome_trace(str(target))
        written = stamp(target) != before
    except OSError as error:  # while it compresses
        print(f"nanovllm: error: {error}", file=sys.stderr)
        target.unlink(missing_ok=True)
        written = False
    target.with_name(f"{target.name}.tmp").unlink(missing_ok=True)
    if not written:
        print(f"nanovllm: error: {target} has not been written", file=sys.stderr)
    return written


def walk(
    llm: LLM, prompts: Sequence[list[int]], number: int, from_start: bool, recorder: AbstractContextManager[Any]
) -> tuple[float, list[Spans]]:
    """Serve prompts from an empty prefix cache, ``number`` steps of it inside ``recorder``.

    Returns how long these took, the device's part included, and their spans. Raises EngineError if there are none.
    """
    llm.reset_prefix_cache()
    engine, seen = llm.llm_engine, Decisions()
    length = number + 2 * SETTLED_TOKENS
    room = engine.limits.max_model_len
    params = SamplingParams(temperature=TEMPERATURE, ignore_eos=True)
    requests = []
    engine.observers.append(seen)
    try:
        for prompt in prompts:
            params.max_tokens = max(1, min(length + len(prompts), room - len(prompt)))
            requests.append(engine.add_request(None, prompt, params))
        running = engine.scheduler.running
        while not from_start and engine.has_unfinished_requests:
            if running and all(request.num_output_tokens >= SETTLED_TOKENS for request in running):
                break
            engine.step()
        _wait()
        with recorder:
            before, began = len(seen.steps), time.perf_counter()
            while len(seen.steps) - before < number and engine.has_unfinished_requests:
                engine.step()
            _wait()
            seconds = time.perf_counter() - began
        steps = seen.steps[before:]
    finally:
        engine.observers.remove(seen)
        for request in requests:
            engine.abort(request.request_id)
    if not steps:
        raise EngineError("there was no step to record: prompt and output must fit the model and the cache.")
    return seconds, steps


def num_tokens(step: Spans) -> int:
    """Return how many tokens a step computes."""
    return sum(stop - start for start, stop, _ in step)


def operator_times(recorded: Any) -> dict[str, tuple[float, int]]:
    """Return seconds and calls of each class of operators, without those that they call."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in recorded.key_averages():
        name = operator_class(event.key)
        seconds, calls = found[name]
        found[name] = seconds + event.self_cpu_time_total / 1e6, calls + event.count
    return dict(found)


def kernel_times(recorded: Any) -> dict[str, tuple[float, int]]:
    """Return seconds and calls of each class of kernels. Where two overlap, the time is that of the earlier one."""
    events = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in recorded.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA") and event.duration_ns()
    ]
    return sort_kernels(events)


def sort_kernels(events: Sequence[tuple[int, int, str]]) -> dict[str, tuple[float, int]]:
    """Do what ``kernel_times`` says with (start, stop, name), in nanoseconds."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    edge = 0
    for start, stop, name in sorted(events):
        seconds, calls = found[kernel_class(name)]
        found[kernel_class(name)] = seconds + max(0, stop - max(start, edge)) / 1e9, calls + 1
        edge = max(edge, stop)
    return dict(found)


def as_parts(
    taken: Mapping[str, tuple[float, int]], seconds: float, number: int, floors: Mapping[str, float], rest: str
) -> list[Part]:
    """Return the classes that took time, in the table's order, for one step; last, what is left of all the time."""
    parts = [
        Part(name, taken[name][0] / number * 1e3, taken[name][1] / number,
             floors[name] / number * 1e3 if name in floors else None)
        for name in CLASSES if name in taken
    ]  # fmt: skip
    left = seconds - sum(took for took, _ in taken.values())
    return [*parts, Part(rest, max(0.0, left) / number * 1e3, 0.0)]


def table(parts: Sequence[Part], total: float, floor: float) -> list[str]:
    """Lay out the parts and their sum."""
    line = "{:<18} {:>10} {:>7} {:>10} {:>7} {:>9}".format
    lines = [line("part", "ms a step", "share", "floor, ms", "of it", "calls")]
    for part in parts:
        known = part.floor is not None and part.milliseconds
        lines.append(line(
            part.name, f"{part.milliseconds:.4f}", f"{part.milliseconds / total:.1%}",
            "-" if part.floor is None else f"{part.floor:.4f}",
            f"{(part.floor or 0.0) / part.milliseconds:.0%}" if known else "-",
            f"{part.calls:.4g}" if part.calls else "",
        ))  # fmt: skip
    return [*lines, line("all", f"{total:.4f}", "", f"{floor:.4f}", f"{floor / total:.0%}", "")]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""How the rows of ``nanovllm bench`` are timed, and on which engines."""

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.build import Plan, plan
from nanovllm.checkpoint import open_checkpoint
from nanovllm.cli.gate import check_finite
from nanovllm.cli.info import count_parameters
from nanovllm.cli.roofline import Costs, Roof, Work, measure_roof
from nanovllm.cli.rows import LARGEST_TOKEN, Load, Row, Sizes, write_shape
from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError, EngineError

TEMPERATURE = 0.6
REPEATS = 3
"""Passes whose median is taken where a pass is short."""
START_SECONDS = 600
"""How long a fresh process may take to its first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured number, what it is made of, and how far it can go."""

    name: str
    value: float
    unit: str
    """``tokens/s``, where more is better; ``ms/step`` or ``s``, where less is."""
    floor: float | None = None
    """The value that this machine cannot pass."""
    note: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What was counted: tokens or steps, and seconds."""

    @property
    def share(self) -> float | None:
        """How much of the floor's speed was reached, 0 to 1."""
        if self.floor is None:
            return None
        return self.value / self.floor if self.unit == "tokens/s" else self.floor / self.value


class Session:
    """The model that is timed, and its engine: one at a time, kept while the next row wants it just like that.

    Making one measures the machine's roof; ``close`` gives everything back.
    """

    def __init__(self, model: str | None, shape: str, options: Mapping[str, Any], sizes: Sizes) -> None:
        self.sizes = sizes
        self._model, self._shape, self._options = model, shape, options
        self._folder = tempfile.TemporaryDirectory(prefix="nanovllm-bench-")
        self._facts: dict[str, Plan] = {}  # by path: a hub name would be looked up each time
        self._open: tuple[str, dict[str, Any], LLM] | None = None
        self._num_engines = 0
        self.plan = self.facts(model or write_shape(self._folder.name, shape))
        self.roof = measure_roof(self.plan.device, self.plan.dtype)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_engine()
        self._folder.cleanup()

    def facts(self, path: str) -> Plan:
        """Return what a model, the user's options and the machine come to, without building anything."""
        if path not in self._facts:
            config = EngineConfig.from_options(path, self._options)
            checkpoint = open_checkpoint(
                config.model, revision=config.revision, download_dir=config.download_dir, token=config.hf_token
            )
            self._facts[path] = plan(config, checkpoint)
        return self._facts[path]

    def path(self, row: Row) -> str:
        """Return the model of a row: the user's, or a folder with the configuration of a shape."""
        if self._model is not None and row.shape is None:
            return self._model
        return write_shape(self._folder.name, row.shape or self._shape)

    def engine_options(self, row: Row) -> dict[str, Any]:
        """Return the options of a row's engine: what the bench wants, the user's, what makes the row what it is."""
        options: dict[str, Any] = {"max_model_len": min(row.max_model_len, self.facts(self.path(row)).max_model_len)}
        if self._model is None or row.shape is not None:
            options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        return options | dict(self._options) | {"use_tqdm_on_load": False} | dict(row.options)

    def engine(self, row: Row) -> LLM:
        """Return an engine as the row wants it, with nothing in its prefix cache."""
        path, options = self.path(row), self.engine_options(row)
        if self._open is None or self._open[:2] != (path, options):
            self.close_engine()
            self._num_engines += 1
            self._open = (path, options, LLM(path, **own_trace(options, self._num_engines)))
            check_finite(self._open[2])
        llm = self._open[2]
        llm.reset_prefix_cache()
        return llm

    def close_engine(self) -> None:
        """Give the engine's memory back to the device: another process, or a larger engine, may want it."""
        if self._open is not None:
            self._open[2].close()
            self._open = None
        gc.collect()  # also what an engine left that could not be built
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def costs(self, row: Row, llm: LLM) -> Costs:
        """Return what the row's model costs on that engine."""
        facts = self.facts(self.path(row))
        cache = str(getattr(llm.config, "kv_cache_dtype", "auto"))
        return Costs(
            config=facts.model,
            num_parameters=count_parameters(facts.model),
            weight_itemsize=facts.storage.itemsize,
            cache_itemsize=1 if cache.startswith("fp8") else facts.dtype.itemsize,
            max_num_seqs=llm.config.max_num_seqs,
        )

    def floor_seconds(self, row: Row, llm: LLM, load: Load, *parts: Callable[[Costs, Load], Work]) -> float:
        """Return the least time that these parts of a load's work take.

        With replicas: where each has its share of the requests, the time of the one that is done first.
        """
        costs, roof = self.costs(row, llm), roof_of_one(self.roof, llm, self.plan.device.type)
        shares = load.parts(llm.config.data_parallel_size)
        return min(sum(part(costs, share).seconds(roof) for part in parts) for share in shares)

    def load(self, row: Row, seed: int = 0) -> Load:
        """Draw what the row works on, from its model's vocabulary."""
        vocab = self.facts(self.path(row)).model.vocab_size
        return self.sizes.load(row, min(LARGEST_TOKEN, vocab - 1), seed)


def own_trace(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the options with a file of its own for the recording of each engine: run.html, run-2.html and so on."""
    file = options.get("trace")
    if not isinstance(file, str) or number == 1:
        return dict(options)
    stem, dot, ending = Path(file).name.partition(".")
    return {**options, "trace": str(Path(file).with_name(f"{stem}-{number}{dot}{ending}"))}


def roof_of_one(roof: Roof, llm: LLM, kind: str) -> Roof:
    """Return the roof of one replica: all its devices', or its share of a CPU."""
    share = 1 / llm.config.data_parallel_size if kind == "cpu" else llm.config.tensor_parallel_size
    return Roof(roof.bytes_per_second * share, roof.flops_per_second * share)


def timed(llm: LLM, load: Load, **params: Any) -> float:
    """Return how long a batch takes. Raises EngineError if an output does not have the length that was asked for."""
    each = [
        SamplingParams(**{"temperature": TEMPERATURE, "ignore_eos": True, "max_tokens": length} | params)
        for length in load.lengths
    ]
    started = time.perf_counter()
    outputs = llm.generate(list(load.prompts), each, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    short = sum(got != asked for got, asked in zip(made, load.lengths, strict=True))
    if short:
        raise EngineError(
            f"{short} of {len(made)} outputs do not have the length asked for, so the time means nothing. "
            "Prompt and output must fit the model and the cache: take a smaller --scale or --max-len."
        )
    return seconds


def warm_up(llm: LLM, load: Load, **params: Any) -> None:
    """Let everything happen that happens once: such prompts, and outputs of all lengths from 1 to 16.

    So batches of many sizes are seen as they end. What it leaves in the prefix cache is forgotten.
    """
    lengths = [min(length, 1 + place % 16) for place, length in enumerate(load.lengths)]
    timed(llm, replace(load, lengths=lengths), **params)
    llm.reset_prefix_cache()


def two_passes(session: Session, llm: LLM, load: Load, **params: Any) -> tuple[float, float]:
    """Return the seconds of a first and of a second pass; they are one where nothing is left to happen once.

    On a GPU the first one records graphs that nobody needed before, and on a new machine it compiles kernels.
    """
    first = seconds = timed(llm, load, **params)
    llm.reset_prefix_cache()
    if session.plan.device.type == "cuda":
        seconds = timed(llm, load, **params)
        llm.reset_prefix_cache()
    return first, seconds


def throughput(session: Session, name: str, row: Row) -> Iterator[Figure]:
    """Output tokens a second of a whole batch, prompts included; one figure for each variant."""
    llm, load = session.engine(row), session.load(row)
    tokens = sum(load.lengths)
    floor = tokens / session.floor_seconds(row, llm, load, Costs.prefill, Costs.decode)
    plain: float | None = None
    for suffix, params in row.variants.items():
        warm_up(llm, session.load(row, seed=1), **params)
        first, seconds = two_passes(session, llm, load, **params)
        speed = tokens / seconds
        notes = [] if plain is None else [f"{speed / plain - 1:+.1%} against plain"]
        if load.shared:
            apart = session.floor_seconds(
                row, llm, load, Costs.prefill, lambda costs, share: costs.decode(replace(share, shared=0))
            )
            notes.append(f"floor {tokens / apart:,.0f} if every request reads a copy of its own")
        if first != seconds:
            notes.append(f"first pass {tokens / first:,.0f}")
        plain, note = speed if plain is None else plain, "; ".join(notes)
        counts = {"tokens": tokens, "prompt_tokens": sum(map(len, load.prompts)), "seconds": seconds}
        yield Figure(name=name + suffix, value=speed, unit="tokens/s", floor=floor, note=note, counts=counts)


def prefill(session: Session, name: str, row: Row) -> Iterator[Figure]:
    """Prompt tokens a second where each prompt gets one token."""
    llm, load = session.engine(row), session.load(row).cut(1)
    warm_up(llm, session.load(row, seed=1).cut(1))
    tokens, (_, seconds) = sum(map(len, load.prompts)), two_passes(session, llm, load)
    floor = tokens / session.floor_seconds(row, llm, load, Costs.prefill)
    counts = {"tokens": tokens, "seconds": seconds}
    yield Figure(name=name, value=tokens / seconds, unit="tokens/s", floor=floor, note="of prompts", counts=counts)


def decode(session: Session, name: str, row: Row) -> Iterator[Figure]:
    """Milliseconds of a step: two output lengths, the difference of their times over that of their steps.

    Prefill is in both times, and mostly in neither: all passes but the first find the prompts in the prefix cache.
    """
    llm, load = session.engine(row), session.load(row)
    number, most, replicas = len(load.prompts), llm.config.max_num_seqs, llm.config.data_parallel_size
    if number > most * replicas:
        times = f" times data_parallel_size={replicas}" if replicas > 1 else ""
        raise ConfigError(f"{number} requests at once are more than max_num_seqs={most}{times}.")
    longest = load.lengths[0]
    first = max(1, longest // 8)
    timed(llm, load.cut(first))
    passes = [(timed(llm, load.cut(first)), timed(llm, load)) for _ in range(REPEATS)]
    seconds = statistics.median(long for _, long in passes) - statistics.median(short for short, _ in passes)
    steps = longest - first
    if seconds <= 0:
        raise EngineError(f"{steps} more steps took no more time: the machine is too busy, or --scale too small.")
    floor = session.floor_seconds(row, llm, load, lambda costs, share: costs.decode(share, first)) / steps * 1e3
    counts = {"steps": steps, "batch_size": len(load.prompts), "seconds": seconds}
    yield Figure(name=name, value=seconds / steps * 1e3, unit="ms/step", floor=floor, counts=counts)


def start(session: Session, name: str, row: Row) -> Iterator[Figure]:
    """Seconds from the start of a process to its first token; the second such process counts.

    On a GPU a third one runs without graphs: the difference is what graphs cost.
    """
    options = session.engine_options(row)
    for name in ("trace", "live"):
        options.pop(name, None)
    session.close_engine()
    first_token(session.path(row), options)
    parts = first_token(session.path(row), options)
    if session.plan.device.type == "cuda" and not options.get("enforce_eager", False):
        eager = first_token(session.path(row), options | {"enforce_eager": True})
        parts["graphs_seconds"] = parts["load_seconds"] - eager["load_seconds"]
        parts["graphs_seconds"] += parts["first_token_seconds"] - eager["first_token_seconds"]
    total = parts.pop("total_seconds")
    note = ", ".join(f"{part.removesuffix('_seconds').replace('_', ' ')} {took:.2f}" for part, took in parts.items())
    yield Figure(name=name, value=total, unit="s", note=note, counts=parts)


def first_token(model: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Run a fresh process to its first token and return what each part took."""
    command = [sys.executable, "-m", "nanovllm.cli.first_token", model, json.dumps(dict(options))]
    began = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineError(f"a fresh process ended with status {done.returncode}: {last}")
    reached: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    parts, before = {}, began
    for part, moment in reached.items():
        parts[f"{part}_seconds"] = moment - before
        before = moment
    return parts | {"total_seconds": before - began}


KINDS: dict[str, Callable[[Session, str, Row], Iterator[Figure]]] = {
    "throughput": throughput, "prefill": prefill, "decode": decode, "start": start
}  # fmt: skip

"""What counting costs: time and Python operations of a step, with ``nanovllm.metrics`` and without.

    python3 bench/metrics.py [--steps 2000] [--rounds 7]

The engine runs over a runner that computes nothing, so that a step is scheduling, settling and counting alone; the same
requests are served in turns with and without the observer, and the medians are compared. Operations are those of
Python's interpreter, counted in one step; they do not depend on the machine. Then a step of a small model in the same
process (4 layers, width 256), for the share. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from types import FrameType, SimpleNamespace
from typing import Any

import clone  # noqa: F401
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.cli.rows import even, write_shape
from nanovllm.config import EngineConfig
from nanovllm.engine import LLMEngine
from nanovllm.metrics import Metrics
from nanovllm.request import Sampled
from nanovllm.scheduler import Scheduler

BATCHES = (1, 256)


class Idle:
    """A runner that draws token 1 everywhere, at once."""

    lookahead = 0

    def submit(self, output: Any) -> Any:
        return lambda: [Sampled(1) if span.samples else None for span in output.spans]


def serving(batch: int, steps: int) -> LLMEngine:
    """An engine in which ``batch`` requests decode, and will for ``steps`` more."""
    scheduler = Scheduler(
        BlockManager(batch * (steps // 16 + 8), 16, enable_prefix_caching=False),
        max_num_seqs=batch, max_num_batched_tokens=4096,
    )  # fmt: skip
    engine = LLMEngine(scheduler, Idle(), Limits(max_model_len=10**6, vocab_size=9))
    for _ in range(batch):
        engine.add_request(None, [1, 2, 3], SamplingParams(max_tokens=steps + 50))
    return engine


def counting(engine: LLMEngine) -> Metrics:
    """The metrics of an engine whose facts do not matter here."""
    facts: Any = SimpleNamespace(device=torch.device("cpu"), block_size=16, cache_dtype=torch.float32)
    metrics = Metrics(engine.scheduler, EngineConfig(model="idle"), facts)
    for requests in engine._requests.values():
        for request in requests:
            metrics.on_arrival(request)
    return metrics


def microseconds(batch: int, steps: int, rounds: int) -> tuple[float, float]:
    """Median microseconds of a step without and with metrics, in turns on one engine."""
    engine = serving(batch, 2 * rounds * steps)
    metrics = counting(engine)
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        engine.step()
    for place in range(2 * rounds):
        engine.observers = [metrics] if place % 2 else []
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        took[bool(place % 2)].append((time.perf_counter() - began) / steps * 1e6)
    return statistics.median(took[False]), statistics.median(took[True])


def alone(batch: int, calls: int = 2000) -> float:
    """Least microseconds, over some rounds, of what the observer is called with in such a step."""
    engine = serving(batch, 20)
    metrics, seen = counting(engine), []
    engine.observers = [metrics, SimpleNamespace(on_decision=id, on_step=lambda *facts: seen.append(facts))]
    for _ in range(3):
        engine.step()
    ((output, times),) = seen[-1:]
    rounds = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(calls // batch + 20):
            metrics.on_decision(output)
            metrics.on_step(output, times)
        rounds.append((time.perf_counter() - began) / (calls // batch + 20))
    return min(rounds) * 1e6


def operations(batch: int) -> int:
    """Operations of the interpreter that metrics add to a step in which the same requests go on."""
    engine = serving(batch, 20)
    engine.observers = [counting(engine)]
    for _ in range(3):
        engine.step()
    counted = 0

    def watch(frame: FrameType, event: str, _: object) -> Any:
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return watch

    totals = []
    for observers in (engine.observers, []):
        engine.observers, counted = observers, 0
        sys.settrace(watch)
        engine.step()
        sys.settrace(None)
        totals.append(counted)
    return totals[0] - totals[1]


def model_step_microseconds(batch: int) -> float:
    """A step of a small model on this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "use_tqdm_on_load": False, "device": "cpu"}
        with LLM(write_shape(folder, "small"), disable_log_stats=True, **options) as llm:
            load, took = even(batch, 16, 24, 4000), []
            for length in (4, 24, 4, 24):
                params = SamplingParams(max_tokens=length, ignore_eos=True)
                began = time.perf_counter()
                llm.generate(load.prompts, params, use_tqdm=False)
                took.append(time.perf_counter() - began)
            return (took[3] - took[2]) / 20 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help="steps of a round at batch 1; fewer at larger ones")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found: dict[str, Any] = {"bench": "metrics", "python": sys.version.split()[0]}
    torch.set_num_threads(1)
    row = "{:>8} {:>12} {:>10} {:>10} {:>12} {:>13} {:>8}"
    print(row.format("requests", "without, us", "with, us", "alone, us", "operations", "model step", "share"))
    for batch in BATCHES:
        without, counted = microseconds(batch, max(50, options.steps // batch), options.rounds)
        cost, number, step = alone(batch), operations(batch), model_step_microseconds(batch)
        print(row.format(
            batch, f"{without:.1f}", f"{counted:.1f}", f"{cost:.2f}", number, f"{step:.0f} us", f"{cost / step:.3%}"
        ))  # fmt: skip
        found[f"batch{batch}"] = {
            "without_us": round(without, 2), "with_us": round(counted, 2), "alone_us": round(cost, 2),
            "operations": number, "model_step_us": round(step), "share": round(cost / step, 6),
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()

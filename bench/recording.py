"""What recording costs: microseconds that ``trace=`` adds to a step, and how long a viewer who comes late holds one up.

    python3 bench/recording.py [--steps 300] [--rounds 7] [--batches 1 32 256]

The engine runs over a runner that computes nothing, so that a step is scheduling, settling and recording alone. Two
engines serve the same requests, all of which decode, one with the recorder and one without, in turns; medians of single
steps are compared, and the slowest hundredth. In a last row requests end after 20 to 500 tokens and others take their
places, so that one comes and goes in most steps. "in it" is the thread's processor time between calls of the recorder
and their returns, as the median of steps and, since some steps do the work of many, as the mean. "message" is that of
the message that takes longest when a viewer is told all, for as long Python may be kept from the engine.

Then a runner that waits two milliseconds a step, as for a device, while a program of its own comes to watch: the
slowest step before it came, and while it was sent what had been recorded. Of some tries the one with the least is told,
for what else runs on the machine only adds to it. The last line is JSON.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from typing import Any, cast

import clone  # noqa: F401

from nanovllm import SamplingParams
from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.observer import Observer
from nanovllm.request import Sampled
from nanovllm.scheduler import Scheduler
from nanovllm.trace.live import Follower, Live
from nanovllm.trace.recorder import Recorder

BLOCK_SIZE, PROMPT, VOCAB = 16, 100, 150_000
PLENTY = 2**40
DEVICE_SECONDS = 0.002

VIEWER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as link:
    link.sendall(f"GET /events HTTP/1.0\\r\\nHost: 127.0.0.1:{sys.argv[1]}\\r\\n\\r\\n".encode())
    while sent := link.recv(2**20):
        print(len(sent), flush=True)
"""


class Idle:
    """A runner that draws some token everywhere, after ``seconds``."""

    lookahead = 0

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds, self._drawn = seconds, 0

    def submit(self, output: Any) -> Any:
        self._drawn = (self._drawn * 1103515245 + 12345) % VOCAB
        sampled = Sampled(self._drawn)
        if self._seconds:
            time.sleep(self._seconds)
        return lambda: [sampled if span.samples else None for span in output.spans]


class Timed:
    """An observer that takes the time of another one."""

    def __init__(self, observer: Any) -> None:
        self._observer, self.took = observer, 0.0

    def __getattr__(self, event: str) -> Any:
        def call(*facts: Any) -> None:
            began = time.thread_time()
            getattr(self._observer, event)(*facts)
            self.took += (time.thread_time() - began) * 1e6

        return call


def serving(batch: int, steps: int, seconds: float = 0.0) -> LLMEngine:
    """An engine that is to serve ``batch`` requests for ``steps`` steps."""
    blocks = BlockManager(batch * ((PROMPT + steps) // BLOCK_SIZE + 8), BLOCK_SIZE)
    scheduler = Scheduler(blocks, max_num_seqs=batch, max_num_batched_tokens=PROMPT * batch)
    return LLMEngine(scheduler, Idle(seconds), Limits(max_model_len=10**6, vocab_size=VOCAB))


def record(engine: LLMEngine) -> Recorder:
    return Recorder(engine, decode=str, max_bytes=PLENTY)


def add(engine: LLMEngine, number: int, length: int) -> None:
    """Queue a request. Lengths of prompts differ, so that blocks are taken in different steps."""
    prompt = [(17 * number + 31 * place) % VOCAB for place in range(PROMPT - number % BLOCK_SIZE)]
    engine.add_request(None, prompt, SamplingParams(max_tokens=length))


def begin(engine: LLMEngine, batch: int, steps: int) -> None:
    """Queue the requests, and let all of them begin."""
    for number in range(batch):
        add(engine, number, steps)
    for _ in range(3):
        engine.step()


def step_times(engine: LLMEngine, steps: int, others: Iterator[int] | None = None) -> list[float]:
    """Microseconds of each of so many steps; ``others`` come for those that have ended, if any."""
    took = []
    for _ in range(steps):
        while others is not None and len(engine._requests) < engine.scheduler.max_running:
            number = next(others)
            add(engine, number, 20 + 97 * number % 480)
        began = time.perf_counter()
        engine.step()
        took.append((time.perf_counter() - began) * 1e6)
    return took


def cost(batch: int, steps: int, rounds: int, *, change: bool = False) -> dict[str, float]:
    """What a recorder adds to a step; if requests ``change``, when some come and others go."""
    engines = {name: serving(batch, 500 if change else rounds * steps + 50) for name in ("without", "with")}
    others = {name: count() if change else None for name in engines}
    made = record(engines["with"])
    timed = Timed(made)
    engines["with"].observers.append(cast("Observer", timed))
    for name, engine in engines.items():
        if change:
            step_times(engine, 500, others[name])
        else:
            begin(engine, batch, rounds * steps + 50)
    took: dict[str, list[float]] = {name: [] for name in engines}
    inside = []
    for _ in range(rounds):
        took["without"] += step_times(engines["without"], steps, others["without"])
        for _ in range(steps):
            timed.took = 0.0
            took["with"] += step_times(engines["with"], 1, others["with"])
            inside.append(timed.took)
    messages, follower = [0.0], Follower(made)
    while True:
        began = time.thread_time()
        if not follower.news():
            break
        messages.append((time.thread_time() - began) * 1e3)
    began = time.perf_counter()
    made.close()
    found = made.recording()
    closing = (time.perf_counter() - began) * 1e3
    assert found["dropped_steps"] == 0 and len(found["steps"][-1]["spans"]) == batch
    assert change == (len(found["requests"]) > batch)
    return {
        **{f"{name}_us": statistics.median(each) for name, each in took.items()},
        **{f"slow_{name}_us": statistics.quantiles(each, n=100)[98] for name, each in took.items()},
        "inside_us": statistics.median(inside), "inside_mean_us": statistics.mean(inside), "message_ms": max(messages),
        "close_ms": closing,
    }  # fmt: skip


def late_viewer(batch: int, steps: int) -> dict[str, float]:
    """Milliseconds of the slowest of the steps before a viewer comes, and while it gets what there is."""
    engine, live = serving(batch, 3 * steps + 50, DEVICE_SECONDS), Live(0)
    made = record(engine)
    engine.observers.append(made)
    live.begin(made)
    begin(engine, batch, 3 * steps + 50)
    before = step_times(engine, steps)
    with subprocess.Popen([sys.executable, "-c", VIEWER, str(live.port)], stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        while_sent = step_times(engine, 2 * steps)
        engine.close()
        live.close()
        sent = sum(map(int, viewer.stdout.read().split()))
    return {
        "before_median_ms": statistics.median(before) / 1e3, "before_most_ms": max(before) / 1e3,
        "while_median_ms": statistics.median(while_sent) / 1e3, "while_most_ms": max(while_sent) / 1e3,
        "sent_megabytes": sent / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    options = parser.parse_args()
    logging.disable()  # where the page is
    found: dict[str, Any] = {"bench": "recording", "python": sys.version.split()[0]}
    row = "{:>8} {:>12} {:>10} {:>11} {:>9} {:>16} {:>12} {:>9}"
    print(
        row.format(
            "requests",
            "without, us",
            "with, us",
            "in it, us",
            "mean, us",
            "slowest 1 %, us",
            "message, ms",
            "close, ms",
        )
    )
    for batch, change in [*((batch, False) for batch in options.batches), (options.batches[-1], True)]:
        each = cost(batch, options.steps, options.rounds, change=change)
        slow = f"{each['slow_without_us']:.0f} / {each['slow_with_us']:.0f}"
        shown = [each[name] for name in ("without_us", "with_us", "inside_us", "inside_mean_us")]
        print(
            row.format(
                batch,
                *(f"{value:.1f}" for value in shown),
                slow,
                f"{each['message_ms']:.1f}",
                f"{each['close_ms']:.0f}",
            )
        )
        found[f"batch{batch}{'_changing' if change else ''}"] = {name: round(value, 2) for name, value in each.items()}
    tries = [late_viewer(options.batches[-1], 2 * options.steps) for _ in range(options.rounds)]
    each = min(tries, key=lambda one: one["while_most_ms"])
    print(
        f"a viewer comes: steps of {each['before_median_ms']:.2f} ms, {each['before_most_ms']:.1f} at most; while it "
        f"is sent {each['sent_megabytes']:.1f} MB {each['while_median_ms']:.2f}, {each['while_most_ms']:.1f} at most"
    )
    found["late_viewer"] = {name: round(value, 3) for name, value in each.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

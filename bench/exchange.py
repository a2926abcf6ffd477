"""What a recorded step's message and tokens cost on one GPU, microseconds a step.

    python3 bench/exchange.py [--rows 1 8 64 256]

A step stands for a model: norms, one after the other, that nobody reads. It is replayed many times back to back, bare;
with a copy of pinned memory in front and one behind; and with ``ops.exchange`` inside. Gate: what went in came out, of
each of some turns. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import clone  # noqa: F401
import torch
from torch import Tensor

from nanovllm.ops.exchange import deliver, receive
from nanovllm.ops.kernels import TRITON
from nanovllm.ops.rms_norm import rms_norm

SLOTS, TURNS, REPLAYS = 3, 20, 200
WORDS_PER_ROW = 40
"""Of a message: a request of some blocks."""


class Step:
    """A recorded step, bare or with the exchange of messages inside."""

    def __init__(self, rows: int, inside: bool) -> None:
        self.rows, words = rows, WORDS_PER_ROW * rows
        self.inbox = torch.zeros(SLOTS, words, dtype=torch.int32, pin_memory=True)
        self.outbox = torch.zeros(SLOTS, rows, dtype=torch.int64, pin_memory=True)
        self.message = torch.zeros(words, dtype=torch.int32, device="cuda")
        self.tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.turn = torch.zeros((), dtype=torch.int64, device="cuda")
        self.x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        self.gain = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
        self._work(inside)  # compiles
        torch.cuda.synchronize()
        self.turn.zero_()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.made = self._work(inside)

    def _work(self, inside: bool) -> list[Tensor]:
        if inside:
            receive(self.inbox, self.turn, self.message)
        made = [self.x]
        for _ in range(100):
            made.append(rms_norm(made[-1], self.gain, 1e-6))
        drawn = self.message[1 : self.rows + 1].long() + 1
        if inside:
            deliver(drawn, self.tokens, self.outbox, self.turn)
        else:
            self.tokens.copy_(drawn)
        return made

    def bare(self, turn: int) -> None:
        self.graph.replay()

    def copied(self, turn: int) -> None:
        self.message.copy_(self.inbox[turn % SLOTS], non_blocking=True)
        self.graph.replay()
        self.outbox[turn % SLOTS].copy_(self.tokens, non_blocking=True)

    def check(self, run: Callable[[int], None]) -> None:
        """Raise AssertionError unless each turn's message comes back as its tokens."""
        for turn in range(TURNS):
            slot = self.inbox[turn % SLOTS]
            slot.random_(0, 2**31 - 2)
            slot[0] = len(slot)
            run(turn)
            torch.cuda.synchronize()
            sent = slot[1 : self.rows + 1].long() + 1
            assert self.outbox[turn % SLOTS].tolist() == sent.tolist(), f"turn {turn}"


def microseconds(run: Callable[[int], None]) -> float:
    """Return the median over rounds of what a step takes, of many back to back."""
    rounds = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for turn in range(REPLAYS):
            run(turn)
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - began) / REPLAYS * 1e6)
    return statistics.median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description="time the messages of a recorded step")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256])
    options = parser.parse_args()
    if not (torch.cuda.is_available() and TRITON):
        sys.exit("bench/exchange.py needs a CUDA device and Triton")
    torch.manual_seed(0)
    table: dict[int, dict[str, float]] = {}
    for rows in options.rows:
        plain, exchanging = Step(rows, inside=False), Step(rows, inside=True)
        plain.check(plain.copied)
        exchanging.check(exchanging.bare)
        ways = {"bare": plain.bare, "copies": plain.copied, "exchange": exchanging.bare}
        table[rows] = {name: round(microseconds(run), 2) for name, run in ways.items()}
    print(f"gate: messages and tokens of {TURNS} turns are right; {torch.cuda.get_device_name()}")
    print("| rows | bare, us | with copies | with the exchange inside |\n| --- | --- | --- | --- |")
    for rows, took in table.items():
        more = (f"+{took[name] - took['bare']:.1f}" for name in ("copies", "exchange"))
        print(f"| {rows} | {took['bare']:.1f} | " + " | ".join(more) + " |")
    print(json.dumps({"device": torch.cuda.get_device_name(), "us": table}))


if __name__ == "__main__":
    main()

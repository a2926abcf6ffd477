"""Choosing tokens on one GPU: microseconds for a step's rows, and the share of the bandwidth of a plain copy.

    python3 bench/sample.py

Logits are bfloat16 of Qwen3's vocabulary, drawn from one normal distribution: nearly flat, so that top_p 0.95 keeps
most of 151,936 tokens, the worst there is for a filter. Those of a real model are peaked ("peaked": five times the
spread), where even top_k 50 keeps nearly every first draw. The gate comes first: what does not mean what its reference
says is not timed. Then calls are captured in a CUDA graph, each with logits of its own, and between two replays the L2
cache is overwritten. The share is that of reading the logits once, however often they are read. The last line is JSON.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
from common import copy_bandwidth, microseconds
from torch import Tensor

from nanovllm.ops import sample
from nanovllm.ops.kernels import TRITON
from nanovllm.ops.penalize import penalize, reference

VOCAB = 151_936
ROWS = (1, 8, 64, 256)
GATE_ROWS = (1, 37)
LOGPROBS = 5
BUFFER_BYTES = 256 * 2**20
"""More than any L2 cache of today."""

# temperature, top_k, top_p
KINDS: dict[str, tuple[float, int, float]] = {
    "greedy": (0.0, 0, 1.0),
    "plain": (1.0, 0, 1.0),
    "top_k 50": (1.0, 50, 1.0),
    "top_p 0.95": (1.0, 0, 0.95),
    "top_k 50, top_p 0.95": (1.0, 50, 0.95),
    "top_p 0.95, peaked": (1.0, 0, 0.95),
    "top_k 50, peaked": (1.0, 50, 1.0),
}
FILTERED = [name for name, (_, top_k, top_p) in KINDS.items() if top_k or top_p < 1]
LOG_PROBS = f"{LOGPROBS} log-probabilities"
HELD = 1000
"""Tokens that each request holds, all different."""
PENALTIES = f"penalties of {HELD} tokens, copy included"


def logits(rows: int, name: str = "") -> Tensor:
    return torch.randn(rows, VOCAB, device="cuda", dtype=torch.bfloat16) * (5 if name.endswith("peaked") else 1)


def settings(name: str, rows: int) -> tuple[Tensor, ...]:
    """Temperatures, top_k, top_p and min_p of the rows."""
    temperature, top_k, top_p = KINDS[name]
    numbers = torch.tensor([[temperature], [top_p], [0.0]], device="cuda").repeat(1, rows)
    return numbers[0], torch.full((rows,), top_k, dtype=torch.int32, device="cuda"), numbers[1], numbers[2]


def caller(name: str, rows: int) -> Callable[[Tensor], object]:
    """Return what is timed: a function of the logits."""
    numbers = torch.arange(rows, device="cuda")
    if name == LOG_PROBS:
        return lambda scores: sample.log_probs(scores, numbers, LOGPROBS)
    if name == PENALTIES:
        given = held(rows)
        return lambda scores: penalized(scores, given)
    values = settings(name, rows)
    return lambda scores: sample.choose(scores, *values, numbers, 3 * numbers, filtered=name in FILTERED)


def held(rows: int) -> tuple[Tensor, ...]:
    """Rows, words, edges, pending tokens and strengths, as ``penalize`` takes them."""
    numbers = torch.arange(rows, device="cuda")
    words = (torch.arange(HELD, device="cuda") * 97 + 2**32).repeat(rows)
    edges = torch.arange(rows + 1, device="cuda") * HELD
    return numbers, words, edges, numbers, torch.tensor([[1.1], [0.2], [0.3]], device="cuda").repeat(1, rows)


def penalized(scores: Tensor, given: tuple[Tensor, ...], door: Callable[..., None] = penalize) -> Tensor:
    """What the sampler does about penalties: a copy in float32, changed where tokens have been."""
    copied = scores.to(torch.float32, copy=True)
    door(copied, *given)
    return copied


def check(rows: int) -> None:
    """Raise AssertionError unless kernels and references agree."""
    numbers = torch.arange(rows, device="cuda")
    for name in KINDS:
        scores, values = logits(rows, name), settings(name, rows)
        if name in FILTERED:
            from nanovllm.ops.sample import kernel

            found, expected = kernel.lowest_kept(scores, *values), sample.reference.lowest_kept(scores, *values)
            assert torch.equal(scores >= found[:, None], scores >= expected[:, None]), f"{name}, {rows} rows"
        found, expected = (
            door.choose(scores, *values, numbers, 3 * numbers, filtered=name in FILTERED)
            for door in (sample, sample.reference)
        )
        # the two best scores of a row may tie to the last bits
        assert int((found != expected).sum()) <= rows // 30, f"{name}, {rows} rows"
    found, expected = (penalized(scores, held(rows), door) for door in (penalize, reference.penalize))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=PENALTIES)
    found, expected = (door.log_probs(scores, numbers, LOGPROBS) for door in (sample, sample.reference))
    for one, other in zip(found[:3], expected[:3], strict=True):  # ids of equal logits may come in any order
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def time_one(call: Callable[[Tensor], object], sources: list[Tensor], flush: Tensor) -> float:
    """Time one call, in a graph of several, each with a source of its own. Microseconds."""
    call(sources[0])  # compiles
    return microseconds(lambda: [call(source) for source in sources], flush) / len(sources)


def main() -> None:
    if not (torch.cuda.is_available() and TRITON):
        sys.exit("bench/sample.py needs a CUDA device and Triton")
    began = time.perf_counter()
    torch.manual_seed(0)
    for rows in GATE_ROWS:
        check(rows)
    print("gate: kernels choose what their references choose")
    flush = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
    copy = copy_bandwidth() / 1e6  # bytes a microsecond
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; a copy moves {copy / 1e6:.2f} TB/s\n")
    print("| microseconds (share of the copy bandwidth), rows: | " + " | ".join(map(str, ROWS)) + " |")
    print("| --- |" + " --- |" * len(ROWS))
    table: dict[str, dict[int, dict[str, float]]] = {}
    for name in (*KINDS, LOG_PROBS, PENALTIES):
        table[name] = {}
        for rows in ROWS:
            num_bytes = rows * VOCAB * 2
            sources = [logits(rows, name) for _ in range(max(2, min(40, BUFFER_BYTES // num_bytes)))]
            took = time_one(caller(name, rows), sources, flush)
            table[name][rows] = {"us": round(took, 2), "share": round(num_bytes / took / copy, 3)}
        cells = [f"{cell['us']:.1f} ({cell['share']:.0%})" for cell in table[name].values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print()
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"device": device, "copy_tb_s": round(copy / 1e6, 3), "seconds": seconds, "sample": table}))


if __name__ == "__main__":
    main()

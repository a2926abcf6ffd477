"""Each kernel on one GPU: microseconds, and its share of the bandwidth of a plain copy.

    python3 bench/ops.py

Shapes are those of Qwen3-0.6B in bfloat16; logits are float32, as its head gives them. The gate comes first: a kernel
that does not mean what its reference says is not timed. Then calls are captured in a CUDA graph, each with buffers of
its own, and between two replays the L2 cache is overwritten: every call reads from memory, as in a step. Bytes are
those that must be read and written once. The last line is JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import copy_bandwidth, microseconds
from torch import Tensor

from nanovllm.ops import activation, look_up, rms_norm, rotary, rotate_and_store, sample, store_kvcache
from nanovllm.ops.kernels import TRITON
from nanovllm.ops.rotate_and_store import reference

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 3072, 16, 8, 128, 151_936
ENTRIES = 16_384
TOKENS = (1, 8, 64, 256, 4096)
GATE_TOKENS = (1, 37, 256)
EPS = 1e-6
BUFFER_BYTES = 256 * 2**20
"""More than any L2 cache of today."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation: how to draw its arguments, what to call, what it weighs, and how far it may be off."""

    name: str
    make: Callable[[int], tuple]
    kernel: Callable
    reference: Callable
    bytes_per_token: int
    tolerance: float


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def qkv(tokens: int) -> Tensor:
    return normal(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)


def logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, device="cuda")


def angles(tokens: int) -> tuple[Tensor, Tensor]:
    turns = torch.rand(tokens, 1, HEAD_DIM // 2, device="cuda") * 100
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((cos, cos), -1).bfloat16(), torch.cat((-sin, sin), -1).bfloat16()


def store_arguments(tokens: int) -> tuple[Tensor, ...]:
    new = qkv(tokens)
    slots = 2 * tokens + 3
    caches = torch.zeros(2, slots, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    mapping = torch.randperm(slots, device="cuda")[:tokens]
    return new[:, HEADS : HEADS + KV_HEADS], new[:, HEADS + KV_HEADS :], *caches, mapping


def stored(store: Callable) -> Callable:
    """Return a store's caches, so that there is something to compare."""

    def call(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, mapping: Tensor) -> tuple[Tensor, Tensor]:
        store(key, value, keys, values, mapping)
        return keys, values

    return call


def fused_arguments(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple:
    slots = 2 * tokens + 3
    caches = torch.zeros(2, slots, KV_HEADS, HEAD_DIM, device="cuda").to(dtype)
    norms = (normal(HEAD_DIM), normal(HEAD_DIM), EPS)
    scales = torch.full((2, KV_HEADS), 0.05, device="cuda") if dtype is torch.float8_e4m3fn else ()
    return qkv(tokens), norms, *angles(tokens), *caches, torch.randperm(slots, device="cuda")[:tokens], *scales


def fused(operation: Callable) -> Callable:
    """Return the caches too, so that they are compared."""
    return lambda *arguments: (operation(*arguments), *arguments[4:6])


def numbers(rows: int) -> Tensor:
    return torch.arange(rows, device="cuda")


FUSED_BYTES = 2 * 2 * (HEADS + KV_HEADS + KV_HEADS) * HEAD_DIM + 2 * 2 * HEAD_DIM + 8

# Two roundings to bfloat16, each of which may fall on either side of a line: two units of 2^-7 of the value; the
# rotation adds products of up to 4. Norm and rotation together do all of that with numbers of up to 16. A step of
# float8 is an eighth. Tokens and stored rows are equal.
UNIT = 2**-7
CASES = (
    Case(
        name="look_up", make=lambda n: (normal(ENTRIES, HIDDEN), torch.randint(ENTRIES, (n,), device="cuda")),
        kernel=look_up.look_up, reference=look_up.reference.look_up,
        bytes_per_token=2 * 2 * HIDDEN + 8, tolerance=0.0,
    ),
    Case(
        name="rms_norm", make=lambda n: (normal(n, HIDDEN), normal(HIDDEN), EPS),
        kernel=rms_norm.rms_norm, reference=rms_norm.reference.rms_norm,
        bytes_per_token=2 * 2 * HIDDEN, tolerance=2 * UNIT,
    ),
    Case(
        name="rms_norm of query heads", make=lambda n: (qkv(n)[:, :HEADS], normal(HEAD_DIM), EPS),
        kernel=rms_norm.rms_norm, reference=rms_norm.reference.rms_norm,
        bytes_per_token=2 * 2 * HEADS * HEAD_DIM, tolerance=2 * UNIT,
    ),
    Case(
        name="add_rms_norm", make=lambda n: (normal(n, HIDDEN), normal(n, HIDDEN), normal(HIDDEN), EPS),
        kernel=rms_norm.add_rms_norm, reference=rms_norm.reference.add_rms_norm,
        bytes_per_token=4 * 2 * HIDDEN, tolerance=2 * UNIT,
    ),
    Case(
        name="rotate", make=lambda n: (qkv(n)[:, : HEADS + KV_HEADS], *angles(n)),
        kernel=rotary.rotate, reference=rotary.reference.rotate,
        bytes_per_token=2 * 2 * (HEADS + KV_HEADS + 1) * HEAD_DIM, tolerance=4 * UNIT,
    ),
    Case(
        name="gate_times_up", make=lambda n: (normal(n, 2 * INTERMEDIATE), "silu"),
        kernel=activation.gate_times_up, reference=activation.reference.gate_times_up,
        bytes_per_token=3 * 2 * INTERMEDIATE, tolerance=2 * UNIT,
    ),
    Case(
        name="store_kvcache", make=store_arguments,
        kernel=stored(store_kvcache.store_kvcache), reference=stored(store_kvcache.reference.store_kvcache),
        bytes_per_token=4 * 2 * KV_HEADS * HEAD_DIM + 8, tolerance=0.0,
    ),
    Case(
        name="rotate_and_store", make=fused_arguments,
        kernel=fused(rotate_and_store.rotate_and_store),
        reference=fused(reference.rotate_and_store),
        bytes_per_token=FUSED_BYTES, tolerance=16 * UNIT,
    ),
    Case(
        name="rotate_and_store in float8", make=lambda n: fused_arguments(n, torch.float8_e4m3fn),
        kernel=fused(rotate_and_store.rotate_and_store),
        reference=fused(reference.rotate_and_store),
        bytes_per_token=FUSED_BYTES - 2 * KV_HEADS * HEAD_DIM, tolerance=2**-3,
    ),
    Case(
        name="greedy", make=lambda n: (logits(n),),
        kernel=sample.greedy, reference=sample.reference.greedy,
        bytes_per_token=4 * VOCAB, tolerance=0.0,
    ),
    Case(
        name="draw", make=lambda n: (logits(n), numbers(n), 3 * numbers(n)),
        kernel=sample.draw, reference=sample.reference.draw,
        bytes_per_token=4 * VOCAB, tolerance=0.0,
    ),
)  # fmt: skip


def copies(arguments: tuple) -> tuple:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


def comparable(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """Return what a call gave, with numbers of float8 in a type that PyTorch compares."""
    parts = (result,) if isinstance(result, Tensor) else result
    return [part.float() if part.dtype is torch.float8_e4m3fn else part for part in parts]


def check(case: Case) -> None:
    """Raise AssertionError unless kernel and reference agree."""
    for tokens in GATE_TOKENS:
        arguments = case.make(tokens)
        expected = comparable(case.reference(*copies(arguments)))
        # the kernel gets the arguments as they are: rows that lie apart
        torch.testing.assert_close(
            comparable(case.kernel(*arguments)), expected, rtol=case.tolerance, atol=case.tolerance,
            msg=lambda text, tokens=tokens: f"{case.name}, {tokens} tokens: {text}",
        )  # fmt: skip


def time_one(call: Callable, make: Callable[[], tuple], num_bytes: int, flush: Tensor) -> float:
    """Time one call, in a graph of several of which none shares a buffer with another. Microseconds."""
    sets = [make() for _ in range(max(2, min(40, BUFFER_BYTES // num_bytes)))]
    call(*sets[0])  # compiles
    return microseconds(lambda: [call(*arguments) for arguments in sets], flush) / len(sets)


def main() -> None:
    if not (torch.cuda.is_available() and TRITON):
        sys.exit("bench/ops.py needs a CUDA device and Triton")
    began = time.perf_counter()
    torch.manual_seed(0)
    for case in CASES:
        check(case)
    print(f"gate: {len(CASES)} operations mean what their references say")
    flush = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
    copy = copy_bandwidth() / 1e6  # bytes a microsecond
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; a copy moves {copy / 1e6:.2f} TB/s\n")
    print("| microseconds (share of the copy bandwidth), tokens: | " + " | ".join(map(str, TOKENS)) + " |")
    print("| --- |" + " --- |" * len(TOKENS))
    table: dict[str, dict[int, dict[str, float]]] = {}
    for case in CASES:
        table[case.name] = {}
        for tokens in TOKENS:
            num_bytes = tokens * case.bytes_per_token
            took = time_one(case.kernel, lambda case=case, tokens=tokens: case.make(tokens), num_bytes, flush)
            table[case.name][tokens] = {"us": round(took, 2), "share": round(num_bytes / took / copy, 3)}
        cells = [f"{cell['us']:.1f} ({cell['share']:.0%})" for cell in table[case.name].values()]
        print(f"| {case.name} | " + " | ".join(cells) + " |", flush=True)
    print()
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"device": device, "copy_tb_s": round(copy / 1e6, 3), "seconds": seconds, "ops": table}))


if __name__ == "__main__":
    main()

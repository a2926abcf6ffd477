"""The Triton attention kernels on one GPU: decode in shares of the bandwidth of a copy, prefill in TFLOP/s.

    python bench/attention.py [--sweep] [--decode-tile 128,4,3] [--prefill-tile 64,8,3] [--min-chunk 256] [--programs 3]

16 query heads, 8 key-value heads of 128 channels, bfloat16. The gate comes first: the kernels must give what the
reference gives, and the same bits whether contexts are cut or not. Times are those of CUDA graphs that go through
several caches of over 200 MB together, so that no cache helps; medians of replays. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from nanovllm.ops.attention import paged, reference

HEADS, KV_HEADS, HEAD_DIM, SCALE = 16, 8, 128, 128**-0.5
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16

DECODE_SWEEP = ("128,4,3", "64,4,3", "128,4,5", "64,4,5", "32,4,5", "128,8,3", "64,8,5", "64,2,5")
PREFILL_SWEEP = ("64,8,3", "64,8,5", "128,8,3", "64,4,3", "64,4,5", "32,8,5")


def draw_lengths() -> list[int]:
    rng = random.Random(0)
    return [rng.randint(100, 1900) for _ in range(256)]


CASES = {f"{batch} x {context}": [context] * batch for batch in (1, 8, 64, 256) for context in (256, 1024, 4096)}
CASES |= {"1 x 32768": [32768], "8 x 32768": [32768] * 8, "256 x 100-1900": draw_lengths()}
SWEPT = ("1 x 1024", "8 x 1024", "64 x 1024", "256 x 1024", "256 x 100-1900", "1 x 32768", "8 x 32768")


@contextmanager
def dials(**values: Any) -> Iterator[None]:
    """Set constants of the backend for a while; None leaves one as it is."""
    before = {name: getattr(paged, name) for name in values}
    try:
        for name, value in values.items():
            if value is not None:
                setattr(paged, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(paged, name, value)


def tiles(text: str | None) -> tuple[tuple[int, ...], ...] | None:
    return None if text is None else (tuple(map(int, text.split(","))),)


def scatter(contexts: list[int], block_size: int) -> tuple[list[list[int]], int]:
    """Draw tables with blocks anywhere in a pool that is just large enough."""
    sizes = [-(-context // block_size) for context in contexts]
    ids = random.Random(1).sample(range(sum(sizes)), sum(sizes))
    edges = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    return [ids[first:stop] for first, stop in pairwise(edges)], len(ids)


def gate() -> None:
    """No figure for a wrong answer."""
    steps = {
        "decodes": ([1] * 6, [1, 15, 256, 257, 1000, 3000]),
        "mixed": ([1, 300, 1, 17, 129, 1], [40, 300, 2000, 500, 700, 1]),
    }
    for name, (sizes, contexts) in steps.items():
        for block_size in (16, 256):
            tables, num_blocks = scatter(contexts, block_size)
            shape = (num_blocks, block_size, KV_HEADS, HEAD_DIM)
            keys, values = (torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(2))
            query = torch.randn(sum(sizes), HEADS + 2, HEAD_DIM, device=DEVICE, dtype=DTYPE)[:, :HEADS]
            starts = torch.tensor([sum(sizes[:place]) for place in range(len(sizes) + 1)])
            width = max(map(len, tables))
            table = torch.tensor([row + [-1] * (width - len(row)) for row in tables], device=DEVICE)
            for window in (None, 100, 600):
                expected = reference.attend(query, keys, values, starts, torch.tensor(contexts), table, SCALE, window)
                plan = paged.plan(sizes, contexts, tables, block_size, DEVICE)
                outs = [
                    paged.attend(query, keys, values, replace(plan, processors=number), SCALE, window)
                    for number in (0, 100_000)
                ]
                torch.testing.assert_close(outs[0], expected, rtol=3e-2, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}")
                assert torch.equal(*outs), f"{name}: cut contexts give other bits"


def seconds(call: Callable[[int], object], number: int) -> float:
    """Return how long ``call(0)`` to ``call(number - 1)`` take in a CUDA graph, each."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for place in range(number):
            call(place)
    took = []
    for _ in range(6):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        took.append(start.elapsed_time(stop) / 1e3 / number)
    return statistics.median(took[1:])


def copy_bandwidth() -> float:
    """Return bytes a second, read and written, of a copy of 2 GiB."""
    source = torch.zeros(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda _: target.copy_(source), 4)


def measure_decode(contexts: list[int], block_size: int, pool: torch.Tensor) -> dict[str, float]:
    tables, num_blocks = scatter(contexts, block_size)
    plan = paged.plan([1] * len(contexts), contexts, tables, block_size, DEVICE)
    shape = (2, num_blocks, block_size, KV_HEADS, HEAD_DIM)
    size = 2 * num_blocks * block_size * KV_HEADS * HEAD_DIM
    number = max(1, min(128, pool.numel() // size, -(-200_000_000 // (2 * size))))
    caches = [pool[place * size : (place + 1) * size].view(shape) for place in range(number)]
    query = torch.randn(len(contexts), HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)[:, :HEADS]
    took = seconds(lambda place: paged.attend(query, caches[place][0], caches[place][1], plan, SCALE), number)
    return {
        "microseconds": took * 1e6,
        "terabytes_per_second": sum(contexts) * TOKEN_BYTES / took / 1e12,
        "parts": plan.owners.shape[0] if plan.splits(KV_HEADS, None) else 0,
    }


def measure_prefill(lengths: list[int], block_size: int, pool: torch.Tensor) -> dict[str, float]:
    tables, num_blocks = scatter(lengths, block_size)
    plan = paged.plan(lengths, lengths, tables, block_size, DEVICE)
    shape = (2, num_blocks, block_size, KV_HEADS, HEAD_DIM)
    keys, values = pool[: 2 * num_blocks * block_size * KV_HEADS * HEAD_DIM].view(shape)
    query = torch.randn(sum(lengths), HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    took = seconds(lambda _: paged.attend(query, keys, values, plan, SCALE), 5)
    flops = sum(2 * 2 * HEADS * HEAD_DIM * length * (length + 1) / 2 for length in lengths)
    return {"microseconds": took * 1e6, "teraflops_per_second": flops / took / 1e12}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="compare tiles, chunks and thresholds on fewer cases")
    parser.add_argument("--decode-tile", help="keys, warps, stages")
    parser.add_argument("--prefill-tile", help="keys, warps, stages")
    parser.add_argument("--min-chunk", type=int)
    parser.add_argument("--programs", type=int, help="PROGRAMS_PER_PROCESSOR")
    options = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    with dials(
        DECODE_TILES=tiles(options.decode_tile), PREFILL_TILES=tiles(options.prefill_tile),
        MIN_CHUNK=options.min_chunk, PROGRAMS_PER_PROCESSOR=options.programs,
    ):  # fmt: skip
        gate()
        roof = copy_bandwidth()
        print(f"gate passed; a copy moves {roof / 1e12:.2f} TB/s ({time.perf_counter() - started:.0f} s)")
        pool = torch.empty(5 << 30, device=DEVICE, dtype=DTYPE)  # 10 GiB: two of the largest cache
        for part in pool.split(1 << 28):
            part.normal_()

        def decode(case: str, block_size: int, label: str = "") -> None:
            row = measure_decode(CASES[case], block_size, pool)
            share = 100 * row["terabytes_per_second"] * 1e12 / roof
            print(f"decode {case:15s} block {block_size:3d} {row['microseconds']:9.1f} us "
                  f"{row['terabytes_per_second']:6.2f} TB/s {share:5.1f} % of a copy {row['parts']:5d} parts {label}",
                  flush=True)  # fmt: skip
            results.append({"case": case, "block_size": block_size, "variant": label, "share": share} | row)

        def prefill(lengths: list[int], label: str = "") -> None:
            row = measure_prefill(lengths, 16, pool)
            case = f"{len(lengths)} x {lengths[0]}"
            print(f"prefill {case:14s} block  16 {row['microseconds']:9.1f} us "
                  f"{row['teraflops_per_second']:6.1f} TFLOP/s {label}", flush=True)  # fmt: skip
            results.append({"case": f"prefill {case}", "variant": label} | row)

        if options.sweep:
            for tile in DECODE_SWEEP:
                with dials(DECODE_TILES=tiles(tile)):
                    for block_size in (16, 256):
                        for case in SWEPT:
                            decode(case, block_size, f"tile {tile}")
            for chunk in (128, 256, 512):
                for programs in (0, 2, 6, 100_000):
                    with dials(MIN_CHUNK=chunk, PROGRAMS_PER_PROCESSOR=programs):
                        for case in SWEPT:
                            if programs or "32768" not in case:
                                decode(case, 16, f"chunk {chunk} programs {programs}")
            for tile in PREFILL_SWEEP:
                with dials(PREFILL_TILES=tiles(tile)):
                    prefill([1024] * 8, f"tile {tile}")
                    prefill([8192], f"tile {tile}")
        else:
            for block_size in (16, 256):
                for case in CASES:
                    decode(case, block_size)
            prefill([1024] * 8)
            prefill([8192])
            contexts = CASES["256 x 100-1900"]
            for block_size in (16, 64, 256):
                tables, _ = scatter(contexts, block_size)
                begin = time.perf_counter()
                for _ in range(20):
                    paged.plan([1] * 256, contexts, tables, block_size, DEVICE)
                row = {"case": "plan 256 x 100-1900", "block_size": block_size}
                row["microseconds"] = (time.perf_counter() - begin) / 20 * 1e6
                print(f"plan of 256 decodes, block {block_size:3d}: {row['microseconds']:.0f} us of the host")
                results.append(row)
    name = torch.cuda.get_device_name()
    summary = {"bench": "attention", "device": name, "torch": torch.__version__, "copy_bytes_per_second": roof}
    print(json.dumps(summary | {"seconds": time.perf_counter() - started, "results": results}))


if __name__ == "__main__":
    main()

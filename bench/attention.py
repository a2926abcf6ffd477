"""The Triton attention kernels on one GPU: decode in shares of the bandwidth of a copy, prefill in TFLOP/s.

    python bench/attention.py [--sweep | --float8] [--decode-tile 32,4,4] [--cut-tile 128,4,2] [--prefill-tile 64,8,3]
                              [--shared-tile 64,64,4,3] [--min-chunk 256] [--short-chunk 128] [--programs 3]

16 query heads, 8 key-value heads of 128 channels, bfloat16; the cache too, or with --float8 that in half the bytes.
The gate comes first: the kernels must give what the reference gives, and where that is promised the same bits whether
contexts are cut or not. "256 x 1792 + 132" are 256 requests that have 1792 tokens in common; their bytes count once.
Times are those of CUDA graphs that go through several caches of over 200 MB together, so that no cache helps; medians
of replays. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from common import copy_bandwidth

from nanovllm.ops.attention import paged, reference
from nanovllm.ops.rotate_and_store.reference import quantize

HEADS, KV_HEADS, HEAD_DIM, SCALE = 16, 8, 128, 128**-0.5
DEVICE, DTYPE, FLOAT8 = torch.device("cuda"), torch.bfloat16, torch.float8_e4m3fn

DECODE_SWEEP = ("32,4,3", "32,4,4", "32,4,4,128", "64,2,3", "64,4,3")
FLOAT8_SWEEP = ("32,4,4", "32,4,6", "64,4,3", "64,4,4", "64,4,3,168", "64,4,4,168", "64,4,6,168", "64,8,4", "128,8,3")
CUT_SWEEP = ("128,4,2", "128,4,3", "64,4,3", "32,4,4")
SHARED_SWEEP = ("64,64,4,3", "64,64,4,2", "64,32,4,3", "128,64,8,3", "128,64,8,2")
PREFILL_SWEEP = ("64,8,3", "64,8,2,128", "128,8,2")


def draw_lengths() -> list[int]:
    rng = random.Random(0)
    return [rng.randint(100, 1900) for _ in range(256)]


CASES = {f"{batch} x {context}": [context] * batch for batch in (1, 8, 64, 256) for context in (256, 1024, 4096)}
CASES |= {"1 x 32768": [32768], "8 x 32768": [32768] * 8, "256 x 100-1900": draw_lengths()}
CASES |= {"8 x 512": [512] * 8, "64 x 512": [512] * 64}
UNCUT = ("64 x 512", "64 x 1024", "256 x 1024", "256 x 100-1900")
CUT = ("1 x 256", "1 x 1024", "8 x 512", "8 x 1024", "64 x 512", "1 x 32768")
COMMON = {f"256 x 1792 + {own}": ([1792 + own] * 256, 1792) for own in (132, 400)}
COMMON |= {"8 x 16384 + 132": ([16516] * 8, 16384), "16 x 512 + 132": ([644] * 16, 512)}
"""Contexts, and how many tokens they have in common."""


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


def scatter(contexts: list[int], block_size: int, common: int = 0) -> tuple[list[list[int]], int]:
    """Draw tables with blocks anywhere in a pool just large enough, the same for the first ``common`` tokens."""
    same = common // block_size
    sizes = [-(-context // block_size) - same for context in contexts]
    ids = random.Random(1).sample(range(same + sum(sizes)), same + sum(sizes))
    edges = [same + sum(sizes[:place]) for place in range(len(sizes) + 1)]
    return [ids[:same] + ids[first:stop] for first, stop in pairwise(edges)], len(ids)


def shared_dials(text: str | None) -> dict[str, Any]:
    """Return the dials of a tile of shared chunks: rows, keys, warps, stages, registers."""
    rows, _, tile = (text or "").partition(",")
    return {"SHARED_ROWS": int(rows), "SHARED_TILES": tiles(tile)} if rows else {}


def uncut_tiles(dtype: torch.dtype) -> str:
    """Name the tiles that uncut decodes take from a cache of this type."""
    return "FLOAT8_TILES" if dtype is FLOAT8 else "DECODE_TILES"


def scales_of(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Draw the scales of the keys and of the values, if the cache has any."""
    return tuple(torch.rand(2, KV_HEADS, device=DEVICE) * 0.02 + 0.01) if dtype is FLOAT8 else ()


def as_read(cache: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a cache in float8, and the numbers that it stands for."""
    narrow = quantize(cache.flatten(0, 1), scales).view(cache.shape)
    return narrow, narrow.float() * scales[:, None]


def gate(dtype: torch.dtype, windows: tuple[int | None, ...], block_sizes: tuple[int, ...]) -> None:
    """No figure for a wrong answer."""
    scales = scales_of(dtype)
    steps = {
        "decodes": ([1] * 6, [1, 15, 256, 257, 1000, 3000], 0),
        "mixed": ([1, 300, 1, 17, 129, 1], [40, 300, 2000, 500, 700, 1], 0),
        "shared": ([1] * 70, [1025 + 3 * place for place in range(70)], 1024),
    }
    for (name, (sizes, contexts, common)), block_size in product(steps.items(), block_sizes):
        tables, num_blocks = scatter(contexts, block_size, common)
        shape = (num_blocks, block_size, KV_HEADS, HEAD_DIM)
        caches = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(2)]
        meant = caches
        if scales:
            caches, meant = zip(*map(as_read, caches, scales), strict=True)
        query = torch.randn(sum(sizes), HEADS + 2, HEAD_DIM, device=DEVICE, dtype=DTYPE)[:, :HEADS]
        starts = torch.tensor([sum(sizes[:place]) for place in range(len(sizes) + 1)])
        width = max(map(len, tables))
        table = torch.tensor([row + [-1] * (width - len(row)) for row in tables], device=DEVICE)
        plan = paged.plan(sizes, contexts, tables, block_size, DEVICE)
        assert bool(plan.shared.shape[0]) == bool(common)
        for window in windows:
            expected = reference.attend(query, *meant, starts, torch.tensor(contexts), table, SCALE, window)

            def attend(processors: int, plan=plan, query=query, caches=caches, window=window) -> torch.Tensor:
                step = replace(plan, processors=processors)
                return paged.attend(query, *caches, step, SCALE, window, *scales)

            for processors in (0, 100_000):
                torch.testing.assert_close(
                    attend(processors), expected, rtol=3e-2, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}"
                )
            ordered = replace(plan, one_tile=True)
            if not common:
                assert torch.equal(attend(0, ordered), attend(100_000, ordered)), (
                    f"{name}: cut contexts give other bits"
                )


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


def measure_decode(contexts: list[int], common: int, block_size: int, pool: torch.Tensor) -> dict[str, float]:
    tables, num_blocks = scatter(contexts, block_size, common)
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    chunk = paged.shortest_chunk(np.array(contexts), KV_HEADS, processors)  # as in CUDA graphs
    plan = paged.plan([1] * len(contexts), contexts, tables, block_size, DEVICE, chunk=chunk)
    shape = (2, num_blocks, block_size, KV_HEADS, HEAD_DIM)
    size = 2 * num_blocks * block_size * KV_HEADS * HEAD_DIM
    token_bytes = 2 * KV_HEADS * HEAD_DIM * pool.element_size()
    number = max(1, min(256, pool.numel() // size, -(-200_000_000 // (pool.element_size() * size))))
    scales = scales_of(pool.dtype)
    caches = [pool[place * size : (place + 1) * size].view(shape) for place in range(number)]
    query = torch.randn(len(contexts), HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)[:, :HEADS]
    took = seconds(lambda place: paged.attend(query, *caches[place], plan, SCALE, None, *scales), number)
    once = sum(contexts) - common * (len(contexts) - 1)  # tokens, those in common counted once
    return {
        "microseconds": took * 1e6,
        "terabytes_per_second": once * token_bytes / took / 1e12,
        "parts": plan.owners.shape[0] if plan.shared.shape[0] or plan.splits(KV_HEADS, None) else 0,
        "shared": plan.shared.shape[0],
    }


def measure_prefill(lengths: list[int], block_size: int, pool: torch.Tensor) -> dict[str, float]:
    tables, num_blocks = scatter(lengths, block_size)
    plan = paged.plan(lengths, lengths, tables, block_size, DEVICE)
    shape = (2, num_blocks, block_size, KV_HEADS, HEAD_DIM)
    keys, values = pool[: 2 * num_blocks * block_size * KV_HEADS * HEAD_DIM].view(shape)
    query = torch.randn(sum(lengths), HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    scales = scales_of(pool.dtype)
    took = seconds(lambda _: paged.attend(query, keys, values, plan, SCALE, None, *scales), 5)
    flops = sum(2 * 2 * HEADS * HEAD_DIM * length * (length + 1) / 2 for length in lengths)
    return {"microseconds": took * 1e6, "teraflops_per_second": flops / took / 1e12}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="compare tiles, chunks and thresholds on fewer cases")
    parser.add_argument("--float8", action="store_true", help="a cache of float8")
    parser.add_argument("--decode-tile", help="keys, warps, stages, registers")
    parser.add_argument("--cut-tile", help="keys, warps, stages, registers")
    parser.add_argument("--prefill-tile", help="keys, warps, stages, registers")
    parser.add_argument("--shared-tile", help="rows, keys, warps, stages, registers")
    parser.add_argument("--min-chunk", type=int, help="of all steps, unless --short-chunk is given too")
    parser.add_argument("--short-chunk", type=int, help="of steps that are small enough")
    parser.add_argument("--programs", type=int, help="PROGRAMS_PER_PROCESSOR")
    options = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    short = {} if options.min_chunk else None
    if options.short_chunk:
        short = {options.short_chunk: 2}
    with dials(
        **dict.fromkeys(("DECODE_TILES", "FLOAT8_TILES"), tiles(options.decode_tile)),
        CUT_TILES=tiles(options.cut_tile),
        PREFILL_TILES=tiles(options.prefill_tile), MIN_CHUNK=options.min_chunk, SHORT_CHUNKS=short,
        PROGRAMS_PER_PROCESSOR=options.programs, **shared_dials(options.shared_tile),
    ):  # fmt: skip
        dtype = FLOAT8 if options.float8 else DTYPE
        gate(dtype, *(((None, 600), (64,)) if options.sweep else ((None, 100, 600), (16, 256))))
        roof = copy_bandwidth()
        print(f"gate passed; a copy moves {roof / 1e12:.2f} TB/s ({time.perf_counter() - started:.0f} s)")
        pool = torch.empty(5 << 30, device=DEVICE, dtype=dtype)  # two of the largest cache
        for part in pool.split(1 << 28):
            part.copy_(torch.randn(part.shape, device=DEVICE, dtype=DTYPE))

        def decode(case: str, block_size: int, label: str = "") -> None:
            row = measure_decode(*(COMMON[case] if case in COMMON else (CASES[case], 0)), block_size, pool)
            share = 100 * row["terabytes_per_second"] * 1e12 / roof
            print(f"decode {case:16s} block {block_size:3d} {row['microseconds']:9.1f} us "
                  f"{row['terabytes_per_second']:6.2f} TB/s {share:5.1f} % of a copy {row['parts']:5d} parts "
                  f"{row['shared']:3d} shared {label}",
                  flush=True)  # fmt: skip
            results.append({"case": case, "block_size": block_size, "variant": label, "share": share} | row)

        def prefill(lengths: list[int], block_size: int, label: str = "") -> None:
            row = measure_prefill(lengths, block_size, pool)
            case = f"{len(lengths)} x {lengths[0]}"
            print(f"prefill {case:14s} block {block_size:3d} {row['microseconds']:9.1f} us "
                  f"{row['teraflops_per_second']:6.1f} TFLOP/s {label}", flush=True)  # fmt: skip
            results.append({"case": f"prefill {case}", "block_size": block_size, "variant": label} | row)

        if options.sweep:
            for tile in FLOAT8_SWEEP if options.float8 else DECODE_SWEEP:
                with dials(**{uncut_tiles(dtype): tiles(tile)}, PROGRAMS_PER_PROCESSOR=0, ROOM=0):
                    for case in UNCUT:
                        decode(case, 64, f"tile {tile}")
            for tile, chunk in product(CUT_SWEEP, (64, 128, 256)):
                keys = int(tile.partition(",")[0])
                with dials(CUT_TILES=tiles(tile), MIN_CHUNK=chunk, SHORT_CHUNKS={}, PROGRAMS_PER_PROCESSOR=100_000):
                    for case in CUT if keys <= chunk else ():
                        decode(case, 64, f"chunk {chunk} tile {tile}")
            for tile in SHARED_SWEEP:
                with dials(**shared_dials(tile), LEAST_SAVED=1):
                    for case in COMMON:
                        decode(case, 64, f"tile {tile}")
            with dials(LEAST_SAVED=1 << 40):
                for case in COMMON:
                    decode(case, 64, "nothing shared")
            for tile in PREFILL_SWEEP:
                with dials(PREFILL_TILES=tiles(tile)):
                    prefill([1024] * 8, 64, f"tile {tile}")
                    prefill([8192], 64, f"tile {tile}")
        else:
            for block_size in (16, 64, 256):
                for case in (*CASES, *COMMON):
                    decode(case, block_size)
            for block_size in (16, 64, 256):
                prefill([1024] * 8, block_size)
                prefill([8192], block_size)
            host = {"256 x 100-1900": (CASES["256 x 100-1900"], 0)} | COMMON
            for (case, (contexts, common)), block_size in product(host.items(), (16, 64, 256)):
                tables, _ = scatter(contexts, block_size, common)
                begin = time.perf_counter()
                for _ in range(20):
                    paged.plan([1] * len(contexts), contexts, tables, block_size, DEVICE)
                row = {"case": f"plan {case}", "block_size": block_size}
                row["microseconds"] = (time.perf_counter() - begin) / 20 * 1e6
                print(f"plan {case:18s} block {block_size:3d} {row['microseconds']:9.1f} us of the host")
                results.append(row)
    name = torch.cuda.get_device_name()
    summary = {"bench": "attention", "device": name, "torch": torch.__version__, "copy_bytes_per_second": roof}
    summary["cache"] = str(dtype)
    print(json.dumps(summary | {"seconds": time.perf_counter() - started, "results": results}))


if __name__ == "__main__":
    main()

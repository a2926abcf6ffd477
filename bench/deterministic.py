"""What ``deterministic=True`` costs: tokens a second with and without, and the product of matrices that it rests on.

    python3 bench/deterministic.py [--requests 256] [--length 100] [--no-products]

Qwen3-0.6B shapes with random weights, 100-1024 prompt tokens, outputs cut to ``--length``, temperature 0.6. The gate
comes first: with the option a few of the requests have the same log-probabilities alone and among all the others, to
the last bit, and every product has the same rows among any number. Without it there are no figures. Then a table of
the products: microseconds of one layer's matrices, read from memory as a step does, for the kernel and for cuBLAS.
The last line is JSON.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clone  # noqa: F401
import torch
import torch.nn.functional as F
from idle import CONFIG
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.ops.kernels import TRITON

ROWS = (1, 8, 64, 256, 1024, 8192)
SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151_936, 1024),
}
COPY_BYTES = 2**28
"""What the weights of one measurement take together, so that the L2 cache does not hold them."""
WITNESSES = 6
"""Requests of the gate that are computed alone too."""


def products() -> dict[str, dict[int, dict[str, float]]]:
    """Check each product, time it, and print a table."""
    from nanovllm.ops.linear import invariant_kernel as kernel

    print("us a product (TFLOP/s; TB/s of the weight)   kernel   cuBLAS   its tile")
    table: dict[str, dict[int, dict[str, float]]] = {}
    for name, (outputs, inputs) in SHAPES.items():
        copies = max(1, min(28, COPY_BYTES // (2 * outputs * inputs)))
        scale = inputs**-0.5
        weights = [torch.randn(outputs, inputs, device="cuda").mul_(scale).bfloat16() for _ in range(copies)]
        table[name] = {}
        most = torch.randn(ROWS[-1], inputs, device="cuda").bfloat16()
        for rows in ROWS if name != "head" else ROWS[:-2]:
            x = most[:rows]
            found = kernel.linear(x, weights[0])
            exact = F.linear(x.float(), weights[0].float())
            assert (found.float() - exact).norm() / exact.norm() < 1e-2, f"{name}, {rows} rows: wrong"
            assert torch.equal(found, kernel.linear(most[: 2 * rows + 1], weights[0])[:rows]), f"{name}: rows differ"
            calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kernel": kernel.linear, "cublas": F.linear}
            took = {way: microseconds(call, x, weights) for way, call in calls.items()}
            table[name][rows] = {way: round(each, 2) for way, each in took.items()}
            flops, moved = 2 * rows * outputs * inputs, 2 * outputs * inputs
            cells = [f"{us:9.2f} ({flops / us / 1e6:5.0f}; {moved / us / 1e6:4.2f})" for us in took.values()]
            tile = kernel.choose(rows, outputs, x.dtype)
            print(f"{name:8s} {rows:5d} rows   {cells[0]}   {cells[1]}   {'x'.join(map(str, tile[:3]))}", flush=True)
    return table


def microseconds(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> float:
    """Time one product: the least of several replays of a graph of products, a weight each."""
    for weight in weights[:2]:
        call(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(x, weight)
    times = []
    for _ in range(8):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(weights))
    return min(times[1:])


def logprobs(output: Any) -> list[dict[int, float]]:
    return [{token: each.logprob for token, each in step.items()} for step in output.outputs[0].logprobs]


def differing(llm: LLM, prompts: list[list[int]]) -> int:
    """Return how many of the first requests have other log-probabilities alone than among all the others."""
    params = [SamplingParams(temperature=0.6, seed=place, max_tokens=16, ignore_eos=True, logprobs=5)
              for place in range(len(prompts))]  # fmt: skip
    together = llm.generate(prompts, params, use_tqdm=False)
    pairs = list(zip(prompts, params, together, strict=True))[:WITNESSES]
    alone = [llm.generate([prompt], [param], use_tqdm=False)[0] for prompt, param, _ in pairs]
    return sum(logprobs(one) != logprobs(many) for one, (*_, many) in zip(alone, pairs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="what deterministic=True costs")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, default=100, help="output tokens of each request")
    parser.add_argument("--no-products", action="store_true", help="leave out the table of products")
    options = parser.parse_args()
    if not (torch.cuda.is_available() and TRITON):
        sys.exit("bench/deterministic.py needs a CUDA device and Triton")
    result: dict[str, Any] = {"bench": "deterministic", "device": torch.cuda.get_device_name(),
                              "torch": torch.__version__, "requests": options.requests}  # fmt: skip
    torch.manual_seed(0)
    if not options.no_products:
        result["products_us"] = products()
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    rng = random.Random(0)
    lengths = [rng.randint(100, 1024) for _ in range(options.requests)]
    prompts = [[rng.randint(0, 10_000) for _ in range(length)] for length in lengths]
    params = SamplingParams(temperature=0.6, max_tokens=options.length, ignore_eos=True)
    figures: dict[str, float] = {}
    for name, deterministic in (("deterministic", True), ("ordinary", False)):
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
                  use_tqdm_on_load=False, deterministic=deterministic)  # fmt: skip
        with llm:
            off = differing(llm, prompts)
            print(f"{name}: {off} of {WITNESSES} requests differ alone and among {options.requests}", flush=True)
            if deterministic and off:
                sys.exit("the gate: deterministic=True is not, so there are no figures")
            took = []
            for _ in range(3):
                begin = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                took.append(time.perf_counter() - begin)
        figures[name] = options.requests * options.length / min(took[1:])
        print(f"{name}: {figures[name]:,.0f} output tokens/s", flush=True)
    print(f"deterministic=True gives {figures['deterministic'] / figures['ordinary']:.0%} of the ordinary speed")
    print(json.dumps({**result, "output_tokens_per_second": figures}))


if __name__ == "__main__":
    main()

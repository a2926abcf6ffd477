"""How much of the main workload's time a GPU has nothing to do, and which kernels take the rest.

    python3 bench/idle.py [--requests 256] [--length 300] [--prompt 512] [--kv-cache-dtype fp8] [--rows 12]

Qwen3-0.6B shapes with random weights, 100-1024 tokens in and out, temperature 0.6. After a warm-up with the same
requests the profiler records a whole run; idle is what no kernel and no copy covers, from the first to the last of
them. The profiler itself slows the host, so the share is an upper bound. The last line is JSON.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import clone  # noqa: F401
import torch
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams
from nanovllm.cli.rows import ROWS, Load, Sizes, even

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def work(requests: int, length: int | None, prompt: int | None) -> Load:
    """Draw the main workload, with outputs or prompts of one length if that is given."""
    load = Sizes(num_requests=requests).load(ROWS["main"])
    if prompt is not None:
        load = replace(load, prompts=even(requests, prompt, 1).prompts)
    return load if length is None else replace(load, lengths=[length] * requests)


def busy(intervals: list[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, edge = 0, 0
    for start, stop in sorted(intervals):
        total += max(0, stop - max(start, edge))
        edge = max(edge, stop)
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, help="output tokens of each request, instead of 100-1024")
    parser.add_argument("--prompt", type=int, help="prompt tokens of each request, instead of 100-1024")
    parser.add_argument("--rows", type=int, default=14, help="kernels in the table")
    options, rest = parser.parse_known_args()
    more: dict[str, Any] = {}
    for name, value in zip(rest[::2], rest[1::2], strict=True):
        more[name.removeprefix("--").replace("-", "_")] = int(value) if value.isdigit() else value
    load = work(options.requests, options.length, options.prompt)
    prompts = list(load.prompts)
    params = [SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True) for length in load.lengths]
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(CONFIG))
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
              use_tqdm_on_load=False, **more)  # fmt: skip
    llm.generate(prompts, params, use_tqdm=False)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    plain = time.perf_counter() - begin
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        llm.generate(prompts, params, use_tqdm=False)
    by_name: dict[str, list[int]] = defaultdict(list)
    intervals = []
    for event in recorded.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns():
            start = event.start_ns()
            intervals.append((start, start + event.duration_ns()))
            by_name[event.name()].append(event.duration_ns())
    span = max(stop for _, stop in intervals) - min(start for start, _ in intervals)
    idle = 1 - busy(intervals) / span
    tokens = sum(load.lengths)
    print(f"{plain:.3f} s without the profiler, {tokens / plain:,.0f} output tokens/s; with it {span / 1e9:.3f} s, "
          f"of which idle {100 * idle:.1f} %")  # fmt: skip
    table = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    for name, durations in table[: options.rows]:
        mean = sum(durations) / len(durations) / 1e3
        print(f"{100 * sum(durations) / span:5.1f} % {len(durations):7d} x {mean:8.1f} us {name[:90]}")
    print(json.dumps({"bench": "idle", "requests": options.requests, "seconds": plain, "idle": idle,
                      "output_tokens_per_second": tokens / plain}))  # fmt: skip


if __name__ == "__main__":
    main()

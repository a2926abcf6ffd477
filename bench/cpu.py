"""Ours against transformers on one CPU: a batch of mixed lengths, one request alone, and memory.

    python bench/cpu.py [--model smollm2-135m-instruct] [--rounds 3]

The workload: 32 requests of 16-128 random prompt tokens and 16-128 output tokens, greedy, end tokens ignored; then
one of them alone with 64 output tokens. transformers pads the batch on the left and runs to the longest output; the
tokens that count are those that were asked for. Each engine runs in a process of its own, in turn, and the gate
comes first: alone, both must give the same tokens. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import clone  # noqa: F401

DTYPE = "auto"
REQUESTS, LOW, HIGH, VOCAB, ALONE = 32, 16, 128, 10_000, 64


def workload() -> tuple[list[list[int]], list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randint(0, VOCAB) for _ in range(rng.randint(LOW, HIGH))] for _ in range(REQUESTS)]
    return prompts, [rng.randint(LOW, HIGH) for _ in range(REQUESTS)]


class Ours:
    """nanovllm as it comes: default options, float32."""

    def __init__(self, path: str) -> None:
        from nanovllm import LLM

        self.llm = LLM(path, dtype=DTYPE, use_tqdm_on_load=False, enable_prefix_caching=False)

    def run(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        from nanovllm import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
        return [output.token_ids for output in self.llm.generate(prompts, params, use_tqdm=False)]


class Transformers:
    """``generate`` with left padding and its own cache, as its documentation shows it."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        file = Path(path)
        self.model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()

    def run(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = self.torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = self.torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with self.torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), min_new_tokens=max(lengths),
                pad_token_id=0,
            )  # fmt: skip
        return [row[width : width + length].tolist() for row, length in zip(out, lengths, strict=True)]


def measure(engine: str, path: str) -> dict[str, Any]:
    """Run one engine in this process."""
    import resource

    started = time.perf_counter()
    runner = {"ours": Ours, "transformers": Transformers}[engine](path)
    loaded = time.perf_counter()
    prompts, lengths = workload()
    runner.run(prompts[:2], [4, 4])
    batch = time.perf_counter()
    runner.run(prompts, lengths)
    alone = time.perf_counter()
    (tokens,) = runner.run(prompts[:1], [ALONE])
    done = time.perf_counter()
    return {
        "load_seconds": loaded - started,
        "batch_tokens_per_second": sum(lengths) / (alone - batch),
        "alone_tokens_per_second": ALONE / (done - alone),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a .gguf file or the built-in name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("ours", "transformers"), help="run one engine here (used by itself)")
    options = parser.parse_args()
    path = Path(options.model)
    if not path.exists():
        from nanovllm.hub import resolve

        path = resolve(options.model)
    if options.engine:
        print(json.dumps(measure(options.engine, str(path))))
        return

    results: dict[str, list[dict[str, Any]]] = {"ours": [], "transformers": []}
    for _ in range(options.rounds):
        for engine, rows in results.items():
            command = [sys.executable, __file__, "--engine", engine, "--model", str(path)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            rows.append(json.loads(printed.stdout.splitlines()[-1]))
        assert results["ours"][-1]["tokens"] == results["transformers"][-1]["tokens"], "no figure for a wrong answer"
    summary: dict[str, Any] = {}
    for figure in ("load_seconds", "batch_tokens_per_second", "alone_tokens_per_second", "peak_megabytes"):
        ours, theirs = ([row[figure] for row in results[engine]] for engine in ("ours", "transformers"))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(f"{figure:26s} ours {statistics.median(ours):9.2f}  transformers {statistics.median(theirs):9.2f}"
              f"  ratio {ratio:5.2f}")  # fmt: skip
        summary[figure] = {"ours": statistics.median(ours), "transformers": statistics.median(theirs), "ratio": ratio}
    print(json.dumps({"bench": "cpu", "rounds": options.rounds, "results": summary}))


if __name__ == "__main__":
    main()

"""``nanovllm bench``: time one batch of random prompts, as engines are usually compared.

The default workload (256 requests, 100-1024 tokens in and out, seed 0: 142,827 tokens in, 133,966 out) is the
one that nano-vllm's benchmark made common; smaller bounds make it bearable on a CPU.
"""

import argparse
import json
import random
import time

import torch

from nanovllm import SamplingParams
from nanovllm.cli.arguments import engine_options
from nanovllm.cli.opening import open_llm, wants_progress
from nanovllm.errors import ConfigError, EngineError


def run(args: argparse.Namespace) -> int:
    """Run the workload once, after a warm-up, and print a table and one line of JSON."""
    if args.min_len > args.max_len:
        raise ConfigError(
            f"--min-len is {args.min_len} and --max-len {args.max_len}; the first must not be greater. Swap them."
        )
    prompts, lengths = workload(args.num_requests, args.min_len, args.max_len, args.vocab, args.seed)
    params = [SamplingParams(temperature=args.temperature, max_tokens=length, ignore_eos=True) for length in lengths]
    loaded = open_llm(args)
    with loaded.llm as llm:
        # Not the first prompt of the workload: its blocks would be found in the prefix cache.
        llm.generate([[0] * args.min_len], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=wants_progress(args))
        seconds = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    if made != lengths:
        short = sum(got != asked for got, asked in zip(made, lengths, strict=True))
        raise EngineError(
            f"{short} of {len(lengths)} outputs do not have the length asked for, so the time means nothing. "
            "Prompt and output must fit the model and the cache: lower --max-len or raise max_model_len."
        )
    tokens_in, tokens_out = sum(map(len, prompts)), sum(lengths)
    figures = {
        "model": args.model,
        "num_requests": args.num_requests,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(tokens_out / seconds, 1),
        "total_tokens_per_second": round((tokens_in + tokens_out) / seconds, 1),
        "import_seconds": round(loaded.import_seconds, 3),
        "load_seconds": round(loaded.load_seconds, 3),
    }
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int | float) else value
        print(f"{name.replace('_', ' '):<26} {shown:>16}")
    settings = {
        "min_len": args.min_len,
        "max_len": args.max_len,
        "seed": args.seed,
        "temperature": args.temperature,
        "options": engine_options(args),
        "torch": torch.__version__,
    }
    print(json.dumps(figures | settings))
    return 0


def workload(num_requests: int, low: int, high: int, vocab: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts as token ids, and output lengths. The order of the draws is part of the workload."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, vocab) for _ in range(rng.randint(low, high))] for _ in range(num_requests)]
    return prompts, [rng.randint(low, high) for _ in range(num_requests)]

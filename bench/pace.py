"""The time between tokens with and without a target, and what the target costs.

    python3 bench/pace.py [--device cpu|cuda] [--target-ms 60] [--decodes 8] [--prompt 1024] [--every 1.5]

Some requests decode all the time; meanwhile long prompts arrive, at the same moments in both runs, each of which would
stop the others for as long as its chunks take. Random weights: on a GPU in the shapes of Qwen3-0.6B, on a CPU in
smaller ones. Without ``--target-ms`` the target is 30 ms on a GPU, where Python takes 12 or more to launch a step with
a prompt, and on a CPU three times the median step of decodes alone, which is measured first. A time between tokens is
one between two steps that gave the same request a token. Both engines serve the load once to warm up, in which the cost
of a step is learned, then in turns, ``--rounds`` times each, so that a machine with other work to do is as busy for one
as for the other. Throughput is all tokens, of prompts and outputs, over all the time that the work took. The last line
is JSON.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import clone  # noqa: F401
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import LLMEngine
from nanovllm.interrupts import old_objects_kept

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = QWEN3 | {
    "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "torch_dtype": "float32",
}  # fmt: skip

DEFAULTS = {
    "cpu": {"decodes": 4, "length": 150, "prompts": 6, "prompt": 768, "every": 0.45},
    "cuda": {"decodes": 64, "length": 600, "prompts": 50, "prompt": 16_384, "every": 0.1, "target_ms": 30.0},
}
"""Of a load in which prompts take a good part of the time, for each device."""


def ids(number: int, seed: int) -> list[int]:
    """Return a prompt of so many tokens."""
    dice = random.Random(seed)
    return [dice.randrange(8000) for _ in range(number)]


def serve(llm: LLM, options: argparse.Namespace) -> tuple[list[float], float, int]:
    """Serve the load; return milliseconds between tokens, seconds in all, tokens in all."""
    with old_objects_kept():  # as LLM and AsyncLLM do
        return _serve(llm.llm_engine, options)


def _serve(engine: LLMEngine, options: argparse.Namespace) -> tuple[list[float], float, int]:
    for number in range(options.decodes):
        params = SamplingParams(max_tokens=options.length, ignore_eos=True)
        engine.add_request(f"decode{number}", ids(64, number), params, stream=True)
    last: dict[str, float] = {}
    gaps: list[float] = []
    tokens = added = 0
    begin = time.perf_counter()
    while engine.has_unfinished_requests or added < options.prompts:
        while added < options.prompts and time.perf_counter() - begin >= added * options.every:
            params = SamplingParams(max_tokens=16, ignore_eos=True)
            engine.add_request(f"prompt{added}", ids(options.prompt, 1000 + added), params, stream=True)
            added += 1
        if not engine.has_unfinished_requests:
            time.sleep(1e-3)
            continue
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            name = output.request_id
            if name in last:
                gaps.append(1e3 * (now - last[name]))
            else:
                tokens += len(output.prompt_token_ids)
            last[name] = now
            tokens += len(output.outputs[0].token_ids)
    return gaps, time.perf_counter() - begin, tokens


PARTS = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def report(gaps: list[float], seconds: float, tokens: int, target_ms: float) -> dict[str, float]:
    """Say in numbers what all rounds of an engine came to."""
    counted = sorted(gaps)
    at = {name: counted[min(int(part * len(counted)), len(counted) - 1)] for name, part in PARTS.items()}
    over = sum(gap > target_ms for gap in counted) / len(counted)
    return at | {"over": over, "seconds": seconds, "tokens_per_second": tokens / seconds}


def measure(folder: str, options: argparse.Namespace, more: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Build both engines and let them serve in turns; sets ``options.target_ms`` where there is none."""
    common = {"device": options.device, "load_format": "dummy", "skip_tokenizer_init": True,
              "enable_prefix_caching": False, "use_tqdm_on_load": False} | more  # fmt: skip
    with LLM(folder, **common) as free:
        serve(free, options)
        decodes = argparse.Namespace(**vars(options) | {"prompts": 0})
        alone = statistics.median(serve(free, decodes)[0])
        options.target_ms = options.target_ms or 3 * alone
        print(f"{options.decodes} decodes alone: {alone:.2f} ms a step; target {options.target_ms:.2f} ms; "
              f"{options.prompts} prompts of {options.prompt} tokens, every {options.every:g} s")  # fmt: skip
        with LLM(folder, target_itl_ms=options.target_ms, **common) as paced:
            serve(paced, options)
            rounds: dict[str, list[tuple[list[float], float, int]]] = {"free": [], "paced": []}
            for _ in range(options.rounds):
                for name, llm in (("free", free), ("paced", paced)):
                    rounds[name].append(serve(llm, options))
    return {
        name: report([gap for gaps, _, _ in runs for gap in gaps], sum(run[1] for run in runs),
                     sum(run[2] for run in runs), options.target_ms)
        for name, runs in rounds.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=DEFAULTS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target-ms", type=float)
    parser.add_argument("--decodes", type=int, help="requests that decode all the time")
    parser.add_argument("--length", type=int, help="tokens that each of them draws")
    parser.add_argument("--prompts", type=int, help="long prompts")
    parser.add_argument("--prompt", type=int, help="tokens of each of them")
    parser.add_argument("--every", type=float, help="seconds between two of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch, on a CPU; fewer than there are cores if others run too")
    options, rest = parser.parse_known_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    more: dict[str, Any] = {"kv_cache_memory_bytes": 40 * 2**30} if options.device == "cuda" else {}  # of two engines
    for name, value in zip(rest[::2], rest[1::2], strict=True):
        more[name.removeprefix("--").replace("-", "_")] = int(value) if value.isdigit() else value
    with tempfile.TemporaryDirectory() as folder:
        shapes = QWEN3 if options.device == "cuda" else SMALL
        Path(folder, "config.json").write_text(json.dumps(shapes))
        runs = measure(folder, options, more)
    print(f"{'':6} {'p50':>9} {'p95':>9} {'p99':>9} {'max':>9}   over target  tokens/s")
    for name, run in runs.items():
        print(f"{name:6} " + " ".join(f"{run[part]:6.2f} ms" for part in PARTS)
              + f"   {100 * run['over']:9.1f} %  {run['tokens_per_second']:,.0f}")  # fmt: skip
    price = 1 - runs["paced"]["tokens_per_second"] / runs["free"]["tokens_per_second"]
    held = runs["paced"]["p95"] <= options.target_ms
    print(f"the target is {'held' if held else 'MISSED'} at the 95th percentile, for {100 * price:.1f} % of throughput")
    print(json.dumps({"bench": "pace", "device": options.device, "target_ms": options.target_ms, "held": held,
                      "price": price, **runs}))  # fmt: skip


if __name__ == "__main__":
    main()

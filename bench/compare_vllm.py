"""Ours and vLLM on the main workload, each in a process of its own.

    python bench/compare_vllm.py [--scale 1] [--model FOLDER] [--python PYTHON] [-o NAME=VALUE] [--vllm NAME=VALUE]

256 requests, 100-1024 tokens in and out, seed 0, temperature 0.6, end tokens ignored; without --model random weights
in Qwen3-0.6B's shapes. ``--python`` names the interpreter that has vLLM, where it is not this one; ``-o`` are options
of our engine, ``--vllm`` of vLLM's. The gate: ours obeys its law, and every output of both has the length that was
asked for. Exit status 2 if vLLM is not installed. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from comparison import MAX_MODEL_LEN, MISSING, TEMPERATURE, last_json, main_load, report, time_ours

from nanovllm.cli.rows import QWEN3_0_6B, Load


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(vllm: Any, llm: Any, load: Load) -> float:
    params = [
        vllm.SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=length, detokenize=False)
        for length in load.lengths
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in load.prompts]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = [len(output.outputs[0].token_ids) for output in outputs]
    assert made == list(load.lengths), "no figure for outputs of another length"
    return seconds


def time_vllm(model: str, scale: float, options: dict[str, Any]) -> int:
    """Run vLLM in this process, after a warm-up with other prompts."""
    try:
        vllm: Any = import_module("vllm")
    except ImportError as error:
        print(f"vLLM cannot be imported by {sys.executable} ({error}); install it, or name a Python with --python.")
        return MISSING
    llm = vllm.LLM(**{"model": model, "max_model_len": MAX_MODEL_LEN, "skip_tokenizer_init": True} | options)
    run(vllm, llm, main_load(model, scale, seed=1).cut(16))
    load = main_load(model, scale)
    seconds = run(vllm, llm, load)
    print(json.dumps({"tokens": sum(load.lengths), "seconds": seconds, "version": vllm.__version__}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="ours and vLLM on the main workload")
    parser.add_argument("--model", help="a model folder; default: random weights in Qwen3-0.6B's shapes")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies lengths and number of requests")
    parser.add_argument("--device", default="auto", help="of ours")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--vllm", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--inside", action="store_true", help="time vLLM in this process (used by itself)")
    args = parser.parse_args()
    if args.inside:
        return time_vllm(args.model, args.scale, dict(map(option, args.vllm)))
    with tempfile.TemporaryDirectory() as folder:
        model, dummy = args.model, []
        if model is None:
            model, dummy = folder, ["load_format=dummy"]
            Path(folder, "config.json").write_text(json.dumps(QWEN3_0_6B))
        inside = [args.python, __file__, "--inside", "--model", model, "--scale", str(args.scale)]
        theirs = last_json([*inside, *(f"--vllm={given}" for given in dummy + args.vllm)])
        ours = time_ours(model, args.scale, args.device, dummy + args.options)
    report(ours, "vllm", theirs, [*ours["gate"], "outputs have the lengths asked for"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

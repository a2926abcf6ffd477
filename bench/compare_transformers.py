"""Ours and transformers' ``generate`` on the main workload, each in a process of its own.

    python bench/compare_transformers.py [--scale 1] [--model FOLDER] [--shape qwen3-0.6b] [--batch-size 64]

256 requests, 100-1024 tokens in and out, seed 0; without --model random weights in the shapes that --shape names.
transformers pads each batch on the left, runs to its longest output and samples at temperature 0.6, as its
documentation shows it; the tokens that count are those that were asked for. The gate comes first: alone and in float32
both must draw the same greedy tokens from the same files. Then each computes in ``--dtype``. Exit status 2 if
transformers is not installed. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comparison import MAX_MODEL_LEN, MISSING, TEMPERATURE, last_json, main_load, report, time_ours

from nanovllm.cli.rows import SHAPES, Load

GATE_REQUESTS, GATE_TOKENS = 3, 8
WIDE = 0.06
"""Spread of random weights: three times the usual, so that the next token depends on all that stands before it."""


def make_model(folder: str, shape: str) -> None:
    """Write a model with random weights where both can read it."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.manual_seed(0)
    config = dict(SHAPES[shape]) | {"initializer_range": WIDE}
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def gate_tokens_of_ours(model: str, scale: float, device: str) -> int:
    from nanovllm import LLM, SamplingParams

    load = main_load(model, scale)
    options = {"device": device, "dtype": "float32", "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    greedy = SamplingParams(temperature=0.0, max_tokens=GATE_TOKENS, ignore_eos=True)
    with LLM(model, max_model_len=MAX_MODEL_LEN, num_gpu_blocks_override=1024, **options) as llm:
        made = [llm.generate([prompt], greedy, use_tqdm=False)[0] for prompt in load.prompts[:GATE_REQUESTS]]
    print(json.dumps({"gate": [output.token_ids for output in made]}))
    return 0


class Transformers:
    """``generate`` with left padding and its own cache."""

    def __init__(self, path: str, device: str, dtype: str) -> None:
        self.torch = import_module("torch")
        chosen = getattr(self.torch, dtype)
        loaded = import_module("transformers").AutoModelForCausalLM.from_pretrained(path, dtype=chosen)
        self.model, self.device = loaded.to(device).eval(), device

    def run(self, prompts: list[list[int]], lengths: list[int], **how: Any) -> list[list[int]]:
        width, longest = max(map(len, prompts)), max(lengths)
        ids = self.torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with self.torch.inference_mode():
            rows = self.model.generate(
                ids, attention_mask=self.torch.tensor(mask, device=self.device), pad_token_id=0,
                max_new_tokens=longest, min_new_tokens=longest, **how,
            ).tolist()  # fmt: skip
        return [row[width : width + length] for row, length in zip(rows, lengths, strict=True)]

    def time(self, load: Load, batch_size: int) -> float:
        started = time.perf_counter()
        for first in range(0, len(load.prompts), batch_size):
            part = slice(first, first + batch_size)
            lengths = list(load.lengths[part])
            made = self.run(list(load.prompts[part]), lengths, do_sample=True, temperature=TEMPERATURE, top_k=0)
            assert [len(tokens) for tokens in made] == lengths, "no figure for outputs of another length"
        return time.perf_counter() - started


def time_theirs(model: str, scale: float, device: str, dtype: str, batch_size: int) -> int:
    load = main_load(model, scale)
    exact = Transformers(model, device, "float32")
    lengths = [GATE_TOKENS]
    gate = [exact.run([prompt], lengths, do_sample=False)[0] for prompt in load.prompts[:GATE_REQUESTS]]
    del exact
    timed = Transformers(model, device, dtype)
    timed.time(main_load(model, scale, seed=1).cut(2), batch_size)
    seconds = timed.time(load, batch_size)
    version = import_module("transformers").__version__
    print(json.dumps({"gate": gate, "tokens": sum(load.lengths), "seconds": seconds, "version": version}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="ours and transformers' generate on the main workload")
    parser.add_argument("--model", help="a model folder; default: random weights")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES, help="of the random weights")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies lengths and number of requests")
    parser.add_argument("--batch-size", type=int, default=64, help="of transformers")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="NAME=VALUE", help="of ours")
    parser.add_argument("--inside", choices=("ours", "theirs"), help="do one part here (used by itself)")
    args = parser.parse_args()
    if find_spec("transformers") is None:
        print(f"transformers is not installed for {sys.executable}; pip install transformers.", file=sys.stderr)
        return MISSING
    if args.model and not args.inside and not Path(args.model, "config.json").exists():
        parser.error(f"{args.model} is no model folder: it has no config.json")
    device = args.device or ("cuda" if import_module("torch").cuda.is_available() else "cpu")
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    if args.inside == "ours":
        return gate_tokens_of_ours(args.model, args.scale, device)
    if args.inside == "theirs":
        if not Path(args.model, "config.json").exists():
            make_model(args.model, args.shape)
        return time_theirs(args.model, args.scale, device, dtype, args.batch_size)

    with tempfile.TemporaryDirectory() as folder:
        model = args.model or folder
        inside = [sys.executable, __file__, "--model", model, "--scale", str(args.scale), "--device", device]
        inside += ["--dtype", dtype, "--batch-size", str(args.batch_size), "--shape", args.shape, "--inside"]
        theirs = last_json([*inside, "theirs"])  # first, for it makes the model
        same = theirs.pop("gate") == last_json([*inside, "ours"])["gate"]
        assert same, "no figure for a wrong answer: greedy tokens alone, in float32, are not those of transformers"
        ours = time_ours(model, args.scale, device, [f"dtype={dtype}", *args.options])
    report(ours, "transformers", theirs, [*ours["gate"], "greedy tokens of both are equal", f"computed in {dtype}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What an FP8 cache costs in accuracy: log-probabilities with it, with the default cache, and in float32.

    python bench/fp8.py MODEL [--device cuda] [--tokens 128] [--long 2000] [--prompts FILE] [-o NAME=VALUE]

MODEL is a folder or a file with real weights and a tokenizer. Prompts are a few of our own and one of ``--long``
tokens, or the lines of a file. The greedy output of float32 is what all are asked about (teacher forcing): how far
are the log-probabilities of the ten best tokens at each place, how often is the best token the same, and after how
many tokens do the greedy outputs of each part. Exit status 2 where the engine takes no such cache. The last line is
JSON.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from compare_vllm import option
from forcing import Scores, best, differences, forced, greedy

from nanovllm import LLM
from nanovllm.errors import ConfigError

PROMPTS = (
    "The capital of France is",
    "def quicksort(numbers):\n",
    "Once upon a time, in a village by the sea, there lived",
    "The three laws of thermodynamics say that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Question: If a train travels 60 miles in 45 minutes, how fast is it going?\nAnswer:",
)
LONG = Path(__file__).resolve().parents[1] / "README.md"
"""What the long prompt is cut from."""
BEST, LOGPROBS = 10, 20
"""Tokens of each place that are compared, and of how many the others are asked: no more are usually allowed."""
RUNS = {
    "float32": {"dtype": "float32"},
    "default": {},
    "fp8": {"kv_cache_dtype": "fp8"},
}
"""The engines, by name. The last two compute in the type that the engine likes best for the model."""


Prompt = str | list[int]


def measure(
    model: str, prompts: Sequence[Prompt], tokens: int, options: dict[str, Any], runs: dict[str, dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return the figures of each pair of ``runs``, later against earlier. The first one's output is what all score."""
    outputs: dict[str, list[list[int]]] = {}
    scores: dict[str, Scores] = {}
    for name, own in runs.items():
        with LLM(model, **{"use_tqdm_on_load": False} | options | own) as llm:
            made = llm.generate(list(prompts), greedy(tokens), use_tqdm=False)
            outputs[name] = [list(output.token_ids) for output in made]
            asked = zip(made, outputs[next(iter(runs))], strict=True)
            scores[name] = [
                place for output, text in asked for place in forced(llm, output.prompt_token_ids, text, LOGPROBS)
            ]
    names = list(runs)
    return {
        f"{later} against {earlier}": compare(outputs, scores, later, earlier)
        for place, later in enumerate(names)
        for earlier in names[:place]
    }


def compare(
    outputs: dict[str, list[list[int]]], scores: dict[str, Scores], later: str, earlier: str
) -> dict[str, float]:
    """Return how far one run is from another."""
    most = [dict(list(place.items())[:BEST]) for place in scores[earlier]]
    apart, lost = differences(scores[later], most)
    pairs = list(zip(outputs[later], outputs[earlier], strict=True))
    alike = [len(list(takewhile(lambda two: two[0] == two[1], zip(a, b, strict=True)))) for a, b in pairs]
    same = [a == b for a, b in zip(best(scores[later]), best(scores[earlier]), strict=True)]
    return {
        "mean": statistics.mean(apart), "max": max(apart), "compared": len(apart), "not_among_the_best": lost,
        "same_best": statistics.mean(same), "equal_outputs": sum(a == b for a, b in pairs), "outputs": len(pairs),
        "tokens_alike": statistics.mean(alike),
    }  # fmt: skip


def long_prompt(model: str, tokens: int, options: dict[str, Any]) -> list[int]:
    """Return the first tokens of our own documentation."""
    with LLM(model, **options | {"load_format": "dummy", "num_gpu_blocks_override": 1, "enforce_eager": True}) as llm:
        return llm.get_tokenizer().encode(LONG.read_text(encoding="utf-8"))[:tokens]


def main() -> int:
    parser = argparse.ArgumentParser(description="what an FP8 cache costs in accuracy")
    parser.add_argument("model", help="a model with real weights: a folder, a file or a name")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    parser.add_argument("--long", type=int, default=2000, help="tokens of the long prompt; 0: none")
    parser.add_argument("--prompts", type=Path, help="a file with a prompt in each line")
    parser.add_argument("-o", dest="options", action="append", default=[], type=option, metavar="NAME=VALUE")
    args = parser.parse_args()
    options = {"device": args.device} | dict(args.options)
    prompts: list[Prompt] = list(args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else PROMPTS)
    try:
        if args.long and not args.prompts:
            prompts.append(long_prompt(args.model, args.long, options | RUNS["fp8"]))  # refused before work is done
        found = measure(args.model, prompts, args.tokens, options, RUNS)
    except ConfigError as error:
        print(f"bench/fp8.py: {error}", file=sys.stderr)
        return 2
    print(f"{args.model}: {len(prompts)} prompts, {args.tokens} tokens each; log-probabilities of the {BEST} best")
    for name, figures in found.items():
        print(f"{name:28s} mean {figures['mean']:.4f}  max {figures['max']:.3f}  same best token "
              f"{figures['same_best']:.1%}  {figures['equal_outputs']} of {figures['outputs']} greedy outputs equal, "
              f"alike for {figures['tokens_alike']:.0f} tokens on average")  # fmt: skip
    print(json.dumps({"bench": "fp8", "model": args.model, "prompts": len(prompts), "figures": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

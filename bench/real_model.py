"""A real model on this device, token by token against float32 references that transformers computed from its file.

    python bench/real_model.py [--model FILE] [--references FILE] [--device cuda] [-o NAME=VALUE]

Without --model SmolLM2-135M-Instruct from the cache folder (NANOVLLM_CACHE), fetched if it is missing. In float32 the
greedy tokens must be the reference's, and the log-probabilities too; in bfloat16 the log-probabilities of the
reference's own tokens (teacher forcing) must lie within MOST and MEAN. Exit status 1 if they do
not. Prints what the model says; the last line is JSON.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from compare_vllm import option
from forcing import Scores, best, differences, forced, greedy

from nanovllm import LLM

REFERENCES = Path(__file__).resolve().parents[1] / "tests" / "references" / "smollm2.json"
EXACT = 1e-3
"""Of a log-probability in float32: ten times what another order of sums has been seen to change."""
MOST, MEAN = 0.5, 0.1
"""In bfloat16: what vLLM allows itself against transformers."""
LOGPROBS = 20


def run(llm: LLM, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Let the model answer, score the reference's tokens, print the texts; return the figures."""
    errors: list[float] = []
    lost = equal = same_best = places = 0
    for sample in samples:
        prompt, expected = sample["prompt_token_ids"], sample["generated_token_ids"]
        (output,) = llm.generate(prompt, greedy(len(expected)), use_tqdm=False)
        assert output.prompt_token_ids == prompt
        tokens = list(output.outputs[0].token_ids)
        print(f"  {sample['prompt'][-40:]!r} -> {output.outputs[0].text!r}")
        known: Scores = [{entry["id"]: entry["logprob"] for entry in entries} for entries in sample["top5"]]
        found = forced(llm, prompt, expected, LOGPROBS)
        apart, missing = differences(found, known)
        errors, lost = errors + apart, lost + missing
        equal += tokens == expected
        same_best += sum(a == b for a, b in zip(best(found), expected, strict=True))
        places += len(expected)
    return {
        "equal_outputs": equal, "outputs": len(samples), "not_among_the_best": lost, "same_best": same_best / places,
        "max_error": max(errors), "mean_error": statistics.mean(errors),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="a real model against float32 references")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--references", type=Path, default=REFERENCES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("-o", dest="options", action="append", default=[], type=option, metavar="NAME=VALUE")
    args = parser.parse_args()
    samples = json.loads(args.references.read_text(encoding="utf-8"))
    figures: dict[str, dict[str, Any]] = {}
    passed = True
    for dtype in args.dtypes:
        options = {"dtype": dtype, "device": args.device, "use_tqdm_on_load": False} | dict(args.options)
        with LLM(args.model, **options) as llm:
            print(f"{dtype}, {llm!r}")
            found = figures[dtype] = run(llm, samples)
        most, mean = (EXACT, EXACT) if dtype == "float32" else (MOST, MEAN)
        good = found["max_error"] < most and found["mean_error"] < mean and not found["not_among_the_best"]
        good = good and (dtype != "float32" or found["equal_outputs"] == found["outputs"])
        passed &= good
        print(f"  {found['equal_outputs']} of {found['outputs']} outputs are the reference's; log-probabilities are "
              f"{found['mean_error']:.2g} off on average, {found['max_error']:.2g} at most; "
              f"{'within' if good else 'OUTSIDE'} the bounds")  # fmt: skip
    print(json.dumps({"bench": "real_model", "model": args.model, "passed": passed, "figures": figures}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""What structured output costs: tokens per second free, all under a schema, and half of them; microseconds a mask.

    python3 bench/structured.py [--model smollm2-135m-instruct] [--requests 16] [--length 64] [-- --max-num-seqs 16 ...]

Without ``--model``: Qwen3-0.6B shapes with random weights and a made-up tokenizer of as many tokens on a GPU, SmolLM2
on a CPU. Gate first: every text under the schema is the beginning of what the schema says. The three workloads take
turns, three times; ratios are of medians. The last line is JSON.
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
from idle import CONFIG
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.ops.mask import mask_logits, reference

SCHEMA = {
    "type": "array",
    "minItems": 10_000,  # never ends before max_tokens
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["small", "medium", "large"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
}
TURNS = 3


def write_model(folder: Path) -> str:
    """Write Qwen3-0.6B's configuration, and a byte-level tokenizer of so many random words."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 0}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    dice, words = random.Random(0), dict.fromkeys(alphabet)
    while len(words) < CONFIG["vocab_size"] - 300:
        words["".join(dice.choices('abcdefghijklmnopqrstuvwxyz0123456789Ġ":,{}[]', k=dice.randint(2, 7)))] = None
    backend = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return str(folder)


def gate(llm: LLM, params: SamplingParams) -> None:
    """Raise if a text leaves its schema, or the operation its meaning."""
    (output,) = llm.generate("A list:", params, use_tqdm=False)
    assert output.text.startswith("[") and output.outputs[0].finish_reason == "length", output.outputs[0]
    device = llm._built.plan.device
    words = torch.randint(-(2**31), 2**31, (3, 1000), device=device).to(torch.int32)
    logits, rows = torch.randn(5, 32_100, device=device), torch.tensor([4, 0, 2], device=device)
    expected = logits.clone()
    reference.mask_logits(expected, rows, words)
    mask_logits(logits, rows, words)
    assert torch.equal(logits, expected)


def microseconds_per_mask(llm: LLM, params: SamplingParams, texts: list[list[int]]) -> tuple[float, float]:
    """Return what llguidance takes for a mask, on average over real states, one by one and all requests together."""
    matchers = [llm.llm_engine._make_matcher(params) for _ in texts]
    masks, alone, together = matchers[0]._masks, [], []
    words = torch.empty(len(texts), -(-masks.vocab_size // 32), dtype=torch.int32)
    for place in range(min(map(len, texts)) - 1):
        for matcher, text in zip(matchers, texts, strict=True):
            matcher.accept(text[place])
        begin = time.perf_counter()
        for row, matcher in enumerate(matchers):
            masks.fill([matcher._matcher], words[row : row + 1])
        middle = time.perf_counter()
        masks.fill([matcher._matcher for matcher in matchers], words)
        alone.append((middle - begin) / len(texts) * 1e6)
        together.append((time.perf_counter() - middle) / len(texts) * 1e6)
    return statistics.mean(alone), statistics.mean(together)


def main() -> None:
    parser = argparse.ArgumentParser()
    gpu = torch.cuda.is_available()
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=256 if gpu else 16)
    parser.add_argument("--length", type=int, default=128 if gpu else 48, help="output tokens of each request")
    options, rest = parser.parse_known_args()
    more: dict[str, Any] = {}
    rest = [each for each in rest if each != "--"]
    for name, value in zip(rest[::2], rest[1::2], strict=True):
        more[name.removeprefix("--").replace("-", "_")] = int(value) if value.isdigit() else value
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or (write_model(Path(folder)) if gpu else "smollm2-135m-instruct")
        dummy = {"load_format": "dummy"} if options.model is None and gpu else {}
        llm = LLM(model, use_tqdm_on_load=False, enable_prefix_caching=False, **dummy, **more)
    wanted = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    free = SamplingParams(temperature=0.8, max_tokens=options.length, ignore_eos=True)
    under = SamplingParams(temperature=0.8, max_tokens=options.length, ignore_eos=True, structured_outputs=wanted)
    gate(llm, under)
    kinds = {"free": [free, free], "all": [under, under], "half": [under, free]}
    prompts = [f"A list of things, number {place}, as JSON: " for place in range(options.requests)]
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    texts: list[list[int]] = []
    for turn in range(-1, TURNS):  # the first warms up
        for kind, pair in kinds.items():
            begin = time.perf_counter()
            outputs = llm.generate(prompts, [pair[place % 2] for place in range(len(prompts))], use_tqdm=False)
            seconds = time.perf_counter() - begin
            assert all(len(output.token_ids) == options.length for output in outputs), "a workload of another length"
            if turn >= 0:
                took[kind].append(seconds)
            if kind == "all":
                texts = [output.token_ids for output in outputs]
    tokens = options.requests * options.length
    speeds = {kind: tokens / statistics.median(seconds) for kind, seconds in took.items()}
    for kind, speed in speeds.items():
        print(f"{kind:5s} {speed:10,.0f} output tokens/s  {speed / speeds['free']:.3f} of free")
    alone, together = microseconds_per_mask(llm, under, texts)
    print(f"a mask takes {alone:.1f} us one by one, {together:.1f} us on llguidance's threads")
    print(json.dumps({"bench": "structured", "device": str(llm._built.plan.device), "requests": options.requests,
                      "length": options.length, "output_tokens_per_second": speeds,
                      "ratio": speeds["all"] / speeds["free"], "ratio_half": speeds["half"] / speeds["free"],
                      "mask_us": alone, "mask_us_together": together}))  # fmt: skip


if __name__ == "__main__":
    main()

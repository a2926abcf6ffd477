"""What a second GPU brings: tokens a second and the time of a step, of one engine, with a second rank, with a replica.

    python3 bench/parallel.py [--shape SHAPE] [--engines 1x1 2x1 1x2] [--requests 256] [--length 256] [--weak]

An engine is written as ranks x replicas: 2x1 is tensor_parallel_size=2, 1x2 data_parallel_size=2. Random weights of
Qwen3's shapes; prompts of 100-1024 tokens, outputs of up to ``--length``, temperature 0.6. The gate comes first: greedy
tokens of a small model are the same for each engine (on GPUs, in bfloat16: log-probabilities are close until tokens
differ). Then for each: seconds to start, tokens a second of a first and a second pass, milliseconds of a step of one
request, and with replicas the largest one's part of the output tokens. ``--weak`` gives N replicas N times the
requests: with as many as one engine has, each replica's steps are smaller, and read as many weights. ``--profile``
prints the kernels of some steps of one request, NCCL's among them. The last line is JSON; ratios are to the first
engine.

On a CPU processes share torch's threads, so engines differ in threads too, and small models are many times faster on
one thread than on two: a ratio there says little of replicas. ``--threads=1`` gives every process one.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import clone  # noqa: F401
import torch

from nanovllm import LLM, SamplingParams

SHAPES = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=64, vocab_size=515),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128, vocab_size=151_936),
    "8b": dict(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128, vocab_size=151_936),
    "32b": dict(hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64, num_attention_heads=64,
                num_key_value_heads=8, head_dim=128, vocab_size=151_936),
}  # fmt: skip
COMMON = dict(architectures=["Qwen3ForCausalLM"], max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6,
              tie_word_embeddings=False, torch_dtype="bfloat16")  # fmt: skip
MOST_GAP = 0.3
"""Log-probability that a token of several ranks may be below the best of one, in bfloat16."""

Engine = tuple[int, int]
"""Ranks and replicas."""


def engine(text: str) -> Engine:
    """Read ``ranks x replicas``."""
    ranks, replicas = map(int, text.split("x"))
    return ranks, replicas


def name(engine: Engine) -> str:
    return f"{engine[0]}x{engine[1]}"


def sizes(engine: Engine) -> dict[str, Any]:
    return dict(tensor_parallel_size=engine[0], data_parallel_size=engine[1])


def write(folder: Path, shape: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**COMMON, **SHAPES[shape]}))
    return str(folder)


def write_weights(folder: Path) -> str:
    """Weights are needed by the gate alone: dummy ones differ from rank to rank."""
    from safetensors.torch import save_file

    from nanovllm.config import ModelConfig
    from nanovllm.loader import build_model

    path = write(folder, "tiny")
    model = build_model(ModelConfig.from_dict({**COMMON, **SHAPES["tiny"]}), 8, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(place.shape) if "norm" in name else torch.randn(place.shape) * 0.15
        for name, place in model.places.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return path


def gate(folder: Path, engines: list[Engine], device: str) -> None:
    """Raise AssertionError unless all engines give the same answers."""
    path = write_weights(folder)
    rng = random.Random(0)
    prompts = [[rng.randrange(515) for _ in range(rng.randint(1, 60))] for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    options: dict[str, Any] = dict(device=device, skip_tokenizer_init=True, num_gpu_blocks_override=64)
    options |= dict(use_tqdm_on_load=False, dtype="float32" if device == "cpu" else "bfloat16")
    found = []
    for each in engines:
        with LLM(path, **sizes(each), **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([(sample.token_ids, sample.logprobs) for output in outputs for sample in output.outputs])
    for each in found[1:]:
        for (tokens, logprobs), (others, scores) in zip(each, found[0], strict=True):
            if device == "cpu":
                assert tokens == others, "processes change greedy tokens"
            for token, other, ours, theirs in zip(tokens, others, logprobs, scores, strict=True):
                gap = abs(ours[token].logprob - theirs[other].logprob)
                assert gap < (1e-4 if device == "cpu" else MOST_GAP), f"log-probabilities {gap} apart"
                if token != other:
                    break


def measure(path: str, engine: Engine, arguments: argparse.Namespace) -> dict[str, float]:
    rng = random.Random(0)
    vocab = SHAPES[arguments.shape]["vocab_size"]
    number = arguments.requests * (engine[1] if arguments.weak else 1)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(100, 1024))] for _ in range(number)]
    lengths = [rng.randint(min(100, arguments.length), arguments.length) for _ in prompts]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]
    started = time.perf_counter()
    options: dict[str, Any] = dict(load_format="dummy", skip_tokenizer_init=True, device=arguments.device)
    options |= dict(use_tqdm_on_load=False, enable_prefix_caching=False)
    with LLM(path, **sizes(engine), **options) as llm:
        ready = time.perf_counter() - started
        one = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=arguments.steps)
        llm.generate(prompts[: min(8, len(prompts))], one, use_tqdm=False)
        steps = []
        for _ in range(3):
            times = [time.perf_counter() for _ in llm.stream([prompts[0][:100]], one)]
            steps += [after - before for before, after in pairwise(times[2:])]
        if arguments.profile:
            profile(llm, prompts[0][:100], one)
        short = [replace(one, max_tokens=1 + place % 16) for place, one in enumerate(params)]
        llm.generate(prompts, short, use_tqdm=False)  # graphs and kernels of all sizes
        passes = []
        for _ in range(2):
            before = output_tokens(llm)
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            passes.append(sum(lengths) / (time.perf_counter() - begun))
        done = [after - earlier for after, earlier in zip(output_tokens(llm), before, strict=True)]
    return dict(
        start_seconds=ready, first_pass=passes[0], tokens_per_second=passes[1],
        step_milliseconds=1e3 * statistics.median(steps), largest_part=max(done) / sum(done) if done else 1.0,
    )  # fmt: skip


def output_tokens(llm: LLM) -> list[int]:
    """Return the tokens that each replica has drawn so far; nothing of an engine that is alone."""
    return [work.output_tokens for work in getattr(llm.llm_engine, "work", ())]


def profile(llm: LLM, prompt: list[int], params: SamplingParams) -> None:
    """Print where the device's time goes on rank 0."""
    with torch.profiler.profile() as profiler:
        llm.generate([prompt], params, use_tqdm=False)
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--engines", type=engine, nargs="+", default=[(1, 1), (2, 1), (1, 2)], metavar="RANKSxREPLICAS")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=64, help="tokens of each request that is timed alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weak", action="store_true", help="so many requests for each replica")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--threads", type=int, help="torch's threads of all processes together, on a CPU")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        gate(Path(folder) / "gate", arguments.engines, arguments.device)
        print(f"gate: greedy answers of {', '.join(map(name, arguments.engines))} agree")
        path = write(Path(folder) / "model", arguments.shape)
        for each in arguments.engines:
            results[name(each)] = found = measure(path, each, arguments)
            print(
                f"{name(each)}: start {found['start_seconds']:6.1f} s  {found['tokens_per_second']:9.1f} tokens/s  "
                f"(first pass {found['first_pass']:.1f})  "
                f"step of one request {found['step_milliseconds']:7.3f} ms  largest part {found['largest_part']:.3f}",
                flush=True,
            )
    base = results[name(arguments.engines[0])]
    for which, found in results.items():
        found["throughput_ratio"] = found["tokens_per_second"] / base["tokens_per_second"]
        found["step_ratio"] = found["step_milliseconds"] / base["step_milliseconds"]
        print(f"{which}: throughput x {found['throughput_ratio']:.2f}, step x {found['step_ratio']:.2f}")
    about = dict(shape=arguments.shape, device=arguments.device, threads=torch.get_num_threads())
    print(json.dumps(dict(bench="parallel", **about, results=results)))


if __name__ == "__main__":
    main()

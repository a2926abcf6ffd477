"""The gate of ``nanovllm bench``: no figure for a wrong answer."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.cli.rows import SHAPES, even, write_shape
from nanovllm.errors import EngineError

GATE_OPTIONS = (
    "device", "attention_backend", "block_size", "kvcache_block_size", "enforce_eager", "compile",
    "enable_prefix_caching", "tensor_parallel_size", "data_parallel_size", "scheduling_policy",
)  # fmt: skip
"""The user's options that say how to compute, not how much: the gate's engines have them too."""
FLOAT32_BACKENDS = ("auto", "triton", "sdpa")
"""Attention backends that compute in float32; the gate says so where it cannot ask the one that is timed."""
GATE_PROMPTS, GATE_TOKENS = (1, 7, 63, 64, 65, 130, 200), 16
GATE_TOLERANCE = 0.01
"""Of a log-probability in float32: far above its rounding, far below what another request's token would change."""


def gate(options: Mapping[str, Any]) -> list[str]:
    """Raise EngineError unless a small model in float32 obeys the law; return what was compared.

    Requests among others must have the tokens that they have alone, with finite logits; on a GPU also with graphs
    what they have without.
    """
    kept = {name: value for name, value in options.items() if name in GATE_OPTIONS}
    backend = kept.get("attention_backend", "auto")
    unasked = [] if backend in FLOAT32_BACKENDS else [f"attention by {kept.pop('attention_backend')} not asked"]
    kept |= {"dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    kept |= {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 256}
    prompts = [even(1, length, 1, SHAPES["small"]["vocab_size"] - 1, seed=length).prompts[0] for length in GATE_PROMPTS]
    with tempfile.TemporaryDirectory(prefix="nanovllm-gate-") as folder:
        path = write_shape(folder, "small")
        with LLM(path, **kept) as llm:
            together, alone = greedy(llm, prompts), [greedy(llm, [prompt])[0] for prompt in prompts]
            plain = tokens_of(llm.generate(prompts, greedy_params(), use_tqdm=False))
            graphs = torch.cuda.is_available() and kept.get("device") != "cpu" and not llm.config.enforce_eager
        compare("alone", alone, "among others", together)
        if plain != tokens_of(together):
            raise EngineError("the gate is shut: log-probabilities change the tokens. No figure for a wrong answer.")
        if not graphs:
            return ["alone = among others", "logits are finite", *unasked]
        with LLM(path, **kept | {"enforce_eager": True, "compile": False}) as llm:
            compare("without graphs", greedy(llm, prompts), "with graphs", together)
        return ["alone = among others", "logits are finite", "graphs on = graphs off", *unasked]


def greedy_params(logprobs: int | None = None) -> SamplingParams:
    """Return what the gate asks for."""
    return SamplingParams(temperature=0.0, max_tokens=GATE_TOKENS, ignore_eos=True, logprobs=logprobs)


def greedy(llm: LLM, prompts: Sequence[list[int]]) -> list[RequestOutput]:
    """Answer from an empty prefix cache, with log-probabilities."""
    llm.reset_prefix_cache()
    return llm.generate(list(prompts), greedy_params(logprobs=1), use_tqdm=False)


def compare(name: str, ours: Sequence[RequestOutput], other_name: str, others: Sequence[RequestOutput]) -> None:
    """Raise EngineError unless both have the same tokens and, but for rounding, the same finite log-probabilities."""
    for place, (one, other) in enumerate(zip(ours, others, strict=True)):
        pair = [drawn_logprobs(output) for output in (one, other)]
        if not all(map(math.isfinite, pair[0] + pair[1])):
            raise EngineError(f"the gate is shut: request {place} has logits that are not finite.")
        apart = max(abs(a - b) for a, b in zip(*pair, strict=True))
        if one.outputs[0].token_ids != other.outputs[0].token_ids or apart > GATE_TOLERANCE:
            raise EngineError(
                f"the gate is shut: request {place} has {one.outputs[0].token_ids} {name} and "
                f"{other.outputs[0].token_ids} {other_name}, log-probabilities {apart:.2g} apart. They must be the "
                "same, and there is no figure for a wrong answer."
            )


def drawn_logprobs(output: RequestOutput) -> list[float]:
    """Return the log-probability of each drawn token."""
    found = output.outputs[0]
    return [entry[token].logprob for entry, token in zip(found.logprobs or (), found.token_ids, strict=True)]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Return each request's drawn tokens."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_finite(llm: LLM) -> None:
    """Raise EngineError if an engine that is about to be timed draws from something that is no number."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
    outputs = llm.generate([[0] * 5, [1] * 9], params, use_tqdm=False)
    if not all(math.isfinite(logprob) for output in outputs for logprob in drawn_logprobs(output)):
        raise EngineError("the model's logits are not finite; a figure for them would mean nothing.")

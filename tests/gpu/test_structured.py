"""Grammars beside graphs and a step ahead, and new weights below recorded graphs."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.config import ModelConfig
from nanovllm.loader import build_model, parameter_places

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 300,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 256,
}  # fmt: skip
"""The vocabulary is padded: the tokenizer has 257 tokens."""


def write(folder: Path, seed: int) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    model = build_model(ModelConfig.from_dict(CONFIG), 8, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(place.shape, generator=generator) * 0.1 + ("norm" in name)
        for name, place in parameter_places(model).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write(tmp_path_factory.mktemp(f"model-{seed}"), seed) for seed in (1, 2)]


def open_llm(folder: Path, **options) -> LLM:
    defaults = dict(dtype="float32", use_tqdm_on_load=False, kv_cache_memory_bytes=1 << 28, device="cuda")
    return LLM(folder, **{**defaults, **options})


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    forms = [
        dict(regex="[a-z]{9}|[0-9]{14}!"),
        None,
        dict(choice=["yes", "日本😀"]),
        dict(grammar='start: "x"~3 /[ab]{7}/'),
    ]
    params = [
        SamplingParams(
            temperature=0.8 if place % 3 else 0.0, seed=place, max_tokens=24, logprobs=2 if place % 5 == 0 else None,
            structured_outputs=None if forms[place % 4] is None else StructuredOutputsParams(**forms[place % 4]),
        )
        for place in range(24)
    ]  # fmt: skip
    return [[place, 7, 9] * (1 + place % 4) for place in range(24)], params


def answers(llm: LLM, prompts, params) -> list[tuple]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].finish_reason, output.text, output.token_ids) for output in outputs]


def test_every_text_has_its_form_with_graphs_and_without(folders):
    pytest.importorskip("llguidance")
    prompts, params = work()
    with open_llm(folders[0]) as llm, open_llm(folders[0], enforce_eager=True) as eager:
        found = answers(llm, prompts, params)
        assert found == answers(eager, prompts, params)
    patterns = ["[a-z]{9}|[0-9]{14}!", None, "yes|日本😀", "xxx[ab]{7}"]
    for place, (reason, text, _) in enumerate(found):
        if pattern := patterns[place % 4]:
            assert reason == "stop" and re.fullmatch(pattern, text)


@pytest.mark.parametrize("deterministic", [False, True])
def test_recorded_graphs_read_the_new_weights(folders, deterministic):
    prompts, _ = work()
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with (
        open_llm(folders[0], deterministic=deterministic) as llm,
        open_llm(folders[1], deterministic=deterministic) as fresh,
    ):
        before = answers(llm, prompts, params)
        memory = torch.cuda.memory_allocated()
        llm.update_weights(load_file(folders[1] / "model.safetensors").items())
        assert torch.cuda.memory_allocated() <= memory
        assert answers(llm, prompts, params) == answers(fresh, prompts, params) != before

"""Tiny float32 models and a tiny tokenizer, written to folders as Hugging Face's libraries would write them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanovllm import LLM
from nanovllm.config import ModelConfig
from nanovllm.loader import build_model, parameter_places

VOCAB = 259  # 256 bytes, then <|end|>, <|start|> and one id without a text
END, START = 256, 257

SIZES = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=1000.0,
    hidden_act="silu", torch_dtype="float32", eos_token_id=END,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(architectures=["LlamaForCausalLM"]),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True),
    "mistral": dict(architectures=["MistralForCausalLM"], sliding_window=7),
}
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}\n{% endfor %}<|start|>assistant:"


def write_model(folder: Path, family: str) -> Path:
    """Draw weights of spread 0.15, so that logits spread over 1 or so and ties are rare."""
    config = {**SIZES, **FAMILIES[family]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(ModelConfig.from_dict(config), 8, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(sum(family.encode()))
    tensors = {}
    for name, place in parameter_places(model).items():
        drawn = torch.randn(place.shape, generator=generator) * 0.15
        tensors[name] = drawn + 1 if "norm" in name else drawn
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: each byte is a token, so characters are cut in all places."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family, each with the tokenizer."""
    root = tmp_path_factory.mktemp("models")
    made = {family: write_model(root / family, family) for family in FAMILIES}
    for folder in made.values():
        write_tokenizer(folder)
    return made


@pytest.fixture
def open_llm(folders: dict[str, Path]) -> Callable[..., LLM]:
    """Open a family's model; every LLM is checked for lost blocks and closed at the end of the test."""
    opened: list[LLM] = []

    def open_one(family: str = "llama", **options: Any) -> LLM:
        defaults = dict(dtype="float32", use_tqdm_on_load=False, block_size=8, num_gpu_blocks_override=256)
        llm = LLM(folders[family], **{**defaults, **options})
        opened.append(llm)
        return llm

    yield open_one
    for llm in opened:
        if llm._built is not None:
            assert_idle(llm)
            llm.close()


def assert_idle(llm: LLM) -> None:
    """Nothing waits, nothing runs, no mail is kept, and every block is free (cached ones count as free)."""
    engine = llm.llm_engine
    scheduler = engine.scheduler
    assert not engine.has_unfinished_requests
    assert not scheduler.waiting
    assert not scheduler.running
    assert not llm._mail
    assert scheduler.blocks.num_held == 0
    scheduler.blocks.check()


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """Names of the above, for test files cannot import each other."""
    return SimpleNamespace(vocab=VOCAB, end=END, start=START, families=list(FAMILIES), assert_idle=assert_idle)

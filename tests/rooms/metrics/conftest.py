"""A tiny model without weights, and the engine of tests/unit/test_scheduler.py, which needs no model."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import EngineConfig, ModelConfig

MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


@pytest.fixture
def open_llm(folder):
    opened = []

    def open_one(**options):
        defaults = {
            "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu",
            "block_size": 8, "num_gpu_blocks_override": 32,
        }  # fmt: skip
        opened.append(LLM(folder, **defaults | options))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


@pytest.fixture(scope="session")
def schedules():
    """The module tests/unit/test_scheduler.py, with its engine over a runner that computes nothing."""
    path = Path(__file__).parents[2] / "unit" / "test_scheduler.py"
    spec = spec_from_file_location("metrics_test_scheduler", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def facts():
    """What a builder would have worked out: changes may be given by name."""

    def make(device="cpu", backend="paged", dtype=torch.bfloat16, cache_dtype=torch.bfloat16, **changes):
        model = ModelConfig.from_dict(MODEL)
        return SimpleNamespace(**{
            "model": model, "device": torch.device(device), "dtype": dtype, "cache_dtype": cache_dtype,
            "block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64,
            "backend": SimpleNamespace(__name__=f"nanovllm.ops.attention.{backend}"),
        } | changes)  # fmt: skip

    return make


@pytest.fixture
def config():
    return lambda **options: EngineConfig(model="some/model", **options)

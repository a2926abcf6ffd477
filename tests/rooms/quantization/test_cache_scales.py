"""Scales of a float8 cache that come with a checkpoint: found under each of their names, used, ignored or refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, build
from nanovllm.config import ModelConfig
from nanovllm.errors import CheckpointError
from nanovllm.kv_cache import KVCache
from nanovllm.loader import build_model, parameter_places
from nanovllm.quantization import cache_scales

MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
CONFIG = ModelConfig.from_dict(MODEL)
FLOAT8 = torch.float8_e4m3fn
LAYER = "model.layers.1.self_attn."


@pytest.fixture
def write(tmp_path):
    """Write a model whose checkpoint has these tensors beside its weights; return the folder."""

    def write_one(more):
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        places = parameter_places(build_model(CONFIG, 8, torch.float32, torch.device("cpu")))
        weights = {name: torch.randn(place.shape) * 0.1 for name, place in places.items()}
        save_file(weights | more, tmp_path / "model.safetensors")
        return tmp_path

    return write_one


def open_llm(folder):
    return LLM(folder, device="cpu", skip_tokenizer_init=True, use_tqdm_on_load=False, num_gpu_blocks_override=4)


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1)], ids=str)
def test_every_spelling_reaches_the_cache(write, monkeypatch, names, shape):
    key, value = (torch.rand(shape) + 0.5 for _ in names)
    folder = write({LAYER + names[0]: key, LAYER + names[1]: value})
    monkeypatch.setattr(build, "_cache_dtype", lambda *given: FLOAT8)  # a CPU would refuse it
    with open_llm(folder) as llm:
        cache = llm.llm_engine._runner.cache
        for found, expected in zip(cache.scales(1), (key, value), strict=True):
            torch.testing.assert_close(found, expected.flatten().expand(2))
        assert all(bool(scales.eq(1).all()) for layer in (0, 2) for scales in cache.scales(layer))


def test_without_a_float8_cache_they_are_left_aside_in_one_line(write, caplog):
    folder = write({LAYER + "k_scale": torch.tensor(0.5), LAYER + "v_scale": torch.tensor(-1.0)})
    with caplog.at_level("INFO", logger="nanovllm"), open_llm(folder) as llm:
        assert llm.llm_engine._runner.cache.scales(1) == ()
    lines = [record.getMessage() for record in caplog.records if "scales" in record.getMessage()]
    assert lines == ["2 scales of keys and values are not used: the cache holds torch.float32"]


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (LAYER + "k_scale", [0.0], r"k_scale' is \[0.0\]; it must be one number above 0"),
        (LAYER + "k_scale", [float("nan")], "must be one number above 0"),
        (LAYER + "v_scale", [1.0, 1.0, 1.0], r"is \[1.0, 1.0, 1.0\]; .* one for each of 2 key-value heads"),
        ("model.layers.3.self_attn.k_scale", [1.0], "no place for; .* model.layers.0 to 2"),
        (LAYER + "k_proj.v_scale", [1.0], "no place for"),
        (LAYER + "kv_scale", [1.0], "no place for"),
        ("model.layers.1.mlp.k_scale", [1.0], "no place for"),
    ],
)
def test_what_is_no_scale_is_refused(name, value, match):
    with pytest.raises(CheckpointError, match=match):
        cache_scales({name: torch.tensor(value)}, CONFIG, FLOAT8)


def test_a_wrong_name_is_refused_whatever_the_cache_holds(write):
    with pytest.raises(CheckpointError, match=r"a scale 'model\.layers\.7.*no place for"):
        open_llm(write({"model.layers.7.self_attn.k_scale": torch.tensor(1.0)}))


def test_one_scale_under_two_names_is_refused():
    named = {LAYER + "k_scale": torch.tensor(1.0), LAYER + "attn.k_scale": torch.tensor(2.0)}
    with pytest.raises(CheckpointError, match="same scale twice: .*self_attn.k_scale' and .*attn.k_scale'"):
        cache_scales(named, CONFIG, FLOAT8)


def test_a_cache_of_float8_begins_with_scales_of_one():
    cache = KVCache.allocate(CONFIG, 5, 4, FLOAT8, torch.device("cpu"))
    assert all(bool(scales.eq(1).all()) for layer in range(3) for scales in cache.scales(layer))

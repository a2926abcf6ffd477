"""A cache in float8: what it weighs, who may have it, and who is told why not."""

import json

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import ModelConfig
from nanovllm.errors import ConfigError
from nanovllm.kv_cache import KVCache, bytes_per_token

MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cpu_says_what_is_needed(name, backend, dtype, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(ConfigError, match="must be 'auto' here: .* needs the Triton .* on a CUDA device") as caught:
        LLM(
            tmp_path, kv_cache_dtype=name, attention_backend=backend, dtype=dtype, device="cpu",
            load_format="dummy", skip_tokenizer_init=True,
        )  # fmt: skip
    assert caught.value.parameter == "kv_cache_dtype" and caught.value.value == name


def test_half_the_bytes_and_a_scale_for_each_head():
    config = ModelConfig.from_dict(MODEL)
    assert 2 * bytes_per_token(config, FLOAT8) == bytes_per_token(config, torch.bfloat16) == 3 * 2 * 2 * 8 * 2
    device = torch.device("cpu")
    cache = KVCache(torch.zeros(3, 2, 5, 4, 2, 8).to(FLOAT8), torch.rand(3, 2, 2))
    keys, _ = cache.slots(1)
    assert keys.dtype is FLOAT8 and keys.shape == (20, 2, 8)
    key_scales, value_scales = cache.scales(1)
    assert key_scales.shape == value_scales.shape == (2,) and not torch.equal(key_scales, value_scales)
    assert KVCache.allocate(config, 5, 4, torch.bfloat16, device).scales(1) == ()


@pytest.mark.gpu
def test_a_cache_on_a_gpu_begins_with_scales_of_one():
    cache = KVCache.allocate(ModelConfig.from_dict(MODEL), 5, 4, FLOAT8, torch.device("cuda"))
    assert cache.data.dtype is FLOAT8 and not cache.data.view(torch.uint8).any()
    assert all(scales.eq(1).all() for layer in range(3) for scales in cache.scales(layer))

"""The engine with a cache of float8: close to one of 16 bits, in twice as many blocks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import ModelConfig
from nanovllm.loader import build_model, parameter_places

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs compute capability 8.9",
    ),
]

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1009,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def first_logprobs(folder: Path, name: str) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 1009, (size,), generator=generator).tolist() for size in (1, 7, 63, 64, 65, 200, 311)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    with LLM(
        folder, kv_cache_dtype=name, load_format="dummy", skip_tokenizer_init=True, num_gpu_blocks_override=64,
        max_num_batched_tokens=256,  # so that prompts come in chunks, and read what is stored
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.token_ids) == 8 for output in outputs)
        return [next(iter(output.outputs[0].logprobs[0].values())).logprob for output in outputs]


def test_log_probabilities_stay_close(folder: Path) -> None:
    """The bounds are those of bfloat16 against float32: three bits more or less of keys and values average out."""
    errors = [abs(a - b) for a, b in zip(*(first_logprobs(folder, name) for name in ("auto", "fp8")), strict=True)]
    assert max(errors) < 0.5 and sum(errors) / len(errors) < 0.1


def test_the_same_memory_holds_twice_the_blocks(folder: Path) -> None:
    memory = (
        40 * 64 * 3 * 2 * 4 * 64 * 2
    )  # 40 blocks of 64 tokens, three layers, keys and values, 4 heads of 64, 16 bits
    numbers = []
    for name in ("auto", "fp8_e4m3"):
        with LLM(
            folder, kv_cache_dtype=name, load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=memory
        ) as llm:
            numbers.append(llm.llm_engine.scheduler.blocks.num_blocks)
    assert numbers == [40, 80]


def test_scales_of_the_checkpoint_make_room_for_large_values(tmp_path: Path) -> None:
    """Values of thousands, which float8 cuts to 448 unless they are divided by their scale."""
    config = CONFIG | {"torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_model(ModelConfig.from_dict(config), 8, torch.float32, torch.device("cpu"))
    tensors = {}
    for name, place in parameter_places(model).items():
        factor = {"v_proj": 1000.0, "o_proj": 0.001}.get(name.split(".")[-2], 1.0)
        tensors[name] = torch.randn(place.shape) * 0.08 * factor + ("norm" in name)
    prompts = [torch.randint(0, 1009, (size,)).tolist() for size in (1, 7, 63, 64, 65, 200, 311)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)

    def best(cache: str, scale: float | None) -> list[dict[int, float]]:
        given = {} if scale is None else {f"model.layers.{n}.self_attn.v_scale": torch.tensor(scale) for n in range(3)}
        save_file(tensors | given, tmp_path / "model.safetensors")
        with LLM(tmp_path, dtype="bfloat16", kv_cache_dtype=cache, skip_tokenizer_init=True,
                 num_gpu_blocks_override=64, enable_prefix_caching=False, enforce_eager=True) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [{t: entry.logprob for t, entry in output.outputs[0].logprobs[0].items()} for output in outputs]

    exact, scaled, cut = best("auto", 16.0), best("fp8", 16.0), best("fp8", None)
    tokens = [next(iter(each)) for each in exact]

    def error(found: list[dict[int, float]]) -> float:
        """Of the likeliest tokens; one that is not even among 20 counts as one of no probability."""
        pairs = zip(tokens, exact, found, strict=True)
        return sum(abs(one[token] - other.get(token, -20.0)) for token, one, other in pairs) / len(tokens)

    assert error(scaled) < 0.3 and error(cut) > 1

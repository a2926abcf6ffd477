"""The engine on a GPU: the CPU's tokens, alone and together, and the memory back at the end."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import ModelConfig
from nanovllm.loader import build_model, parameter_places

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1009,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    model = build_model(ModelConfig.from_dict(CONFIG), 8, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, place in parameter_places(model).items():
        drawn = torch.randn(place.shape, generator=generator) * 0.08
        tensors[name] = drawn + 1 if "norm" in name else drawn
    save_file(tensors, made / "model.safetensors")
    return made


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 1009, (size,), generator=generator).tolist() for size in (1, 7, 63, 64, 65, 200, 311)]


def run(folder: Path, device: str, **options: object) -> list[list[int]]:
    with LLM(
        folder, device=device, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=256, **options
    ) as llm:
        return [output.token_ids for output in llm.generate(prompts(), GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("options", [{}, {"block_size": 16}, {"max_num_batched_tokens": 48}], ids=str)
def test_tokens_are_those_of_the_cpu(folder: Path, options: dict) -> None:
    assert run(folder, "cuda", **options) == run(folder, "cpu", **options)


def test_bfloat16_stays_close_to_float32(folder: Path) -> None:
    """Teacher forcing: what each step of bfloat16 says of the tokens that float32 would take."""
    scored = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=5)
    found: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        with LLM(folder, device="cuda", dtype=dtype, skip_tokenizer_init=True, num_gpu_blocks_override=256) as llm:
            outputs = llm.generate(prompts(), scored, use_tqdm=False)
            found[dtype] = [next(iter(output.outputs[0].logprobs[0].values())).logprob for output in outputs]
    errors = [abs(a - b) for a, b in zip(found["float32"], found["bfloat16"], strict=True)]
    assert max(errors) < 0.5 and sum(errors) / len(errors) < 0.1


def test_memory_comes_back(folder: Path) -> None:
    run(folder, "cuda")
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run(folder, "cuda")
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.alone
def test_other_processes_have_the_room_of_a_closed_engine(folder: Path) -> None:
    run(folder, "cuda")  # what libraries keep for themselves
    before = torch.cuda.mem_get_info()[0]
    with LLM(folder, device="cuda", skip_tokenizer_init=True, kv_cache_memory_bytes=2**28) as llm:
        llm.generate(prompts(), SamplingParams(max_tokens=2), use_tqdm=False)
        assert before - torch.cuda.mem_get_info()[0] > 2**27
    assert before - torch.cuda.mem_get_info()[0] < 2**27


@pytest.mark.alone
def test_a_second_engine_has_the_room_of_the_first(folder: Path) -> None:
    sizes = []
    for _ in range(2):
        with LLM(folder, device="cuda", skip_tokenizer_init=True, max_num_seqs=4) as llm:
            sizes.append(llm.llm_engine.scheduler.blocks.num_blocks)
    assert sizes[1] >= 0.95 * sizes[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True, "attention_backend": "sdpa"}], ids=str)
def test_a_device_that_is_not_the_current_one(folder: Path, options: dict) -> None:
    assert run(folder, "cuda:1", **options) == run(folder, "cuda:0", **options)
    assert torch.cuda.current_device() == 0

"""What options, checkpoint and machine come to: types, and the attention backend that they allow."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import build
from nanovllm.config import EngineConfig
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.kv_cache import bytes_per_token

CUDA, CPU = torch.device("cuda"), torch.device("cpu")

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "head_dim": 16, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip


def plan_on(device, monkeypatch, *, capability=(9, 0), memory=80e9, model=LLAMA, **options):
    """Plan as if on a device of that capability, with so many bytes of memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *which: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *which: SimpleNamespace(total_memory=memory))
    monkeypatch.setattr(build, "_device", lambda name: device)
    return build.plan(EngineConfig.from_options("folder", options), SimpleNamespace(config=model))


@pytest.mark.parametrize("stored", ["bfloat16", "float32", None])
@pytest.mark.parametrize("wanted", ["auto", "bfloat16"])
def test_a_device_without_bfloat16_gets_float16_and_one_warning(wanted, stored, monkeypatch, caplog):
    plan = plan_on(CUDA, monkeypatch, capability=(7, 5), model=LLAMA | {"torch_dtype": stored}, dtype=wanted)
    assert plan.dtype is plan.storage is torch.float16
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["float16 instead of bfloat16: this device's compute capability is 7.5, below 8.0"]


@pytest.mark.parametrize(
    ("wanted", "stored", "capability", "given"),
    [
        ("auto", "bfloat16", (8, 0), "bfloat16"), ("auto", "float32", (9, 0), "bfloat16"),
        ("auto", "float16", (7, 5), "float16"), ("bfloat16", "float16", (12, 0), "bfloat16"),
        ("float16", "bfloat16", (7, 5), "float16"), ("half", None, (8, 9), "float16"),
        ("float32", "bfloat16", (7, 5), "float32"), ("float", None, (9, 0), "float32"),
    ],
)  # fmt: skip
def test_types_that_a_gpu_has_are_given_without_a_warning(wanted, stored, capability, given, monkeypatch, caplog):
    plan = plan_on(CUDA, monkeypatch, capability=capability, model=LLAMA | {"dtype": stored}, dtype=wanted)
    assert plan.dtype is plan.storage is getattr(torch, given)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_cpu_is_not_asked_for_its_compute_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *which: pytest.fail("asked"))
    assert build._dtypes("bfloat16", None, CPU) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "memory", "options", "tokens"),
    [
        (CUDA, 150e9, {}, 16_384), (CUDA, 70e9, {}, 16_384), (CUDA, 48e9, {}, 8192), (CPU, 150e9, {}, 512),
        (CUDA, 150e9, {"max_num_batched_tokens": 300}, 300),
    ],
)  # fmt: skip
def test_a_step_has_more_tokens_on_a_large_gpu(device, memory, options, tokens, monkeypatch):
    assert plan_on(device, monkeypatch, memory=memory, **options).max_num_batched_tokens == tokens


@pytest.mark.parametrize(
    ("meminfo", "given"),
    [
        ("MemTotal: 9000000 kB\nMemFree:     100 kB\nMemAvailable: 2000000 kB\n", 1_024_000_000),
        ("MemTotal: 90000000 kB\nMemFree:     100 kB\nMemAvailable: 80000000 kB\n", build.CPU_CACHE_BYTES),
        ("MemTotal: 9000000 kB\nMemFree:     100 kB\n", build.CPU_CACHE_BYTES),
        (None, build.CPU_CACHE_BYTES),
    ],
)
def test_on_a_cpu_memory_full_of_cached_files_can_be_had(meminfo, given, tmp_path, monkeypatch):
    """``MemFree`` is next to nothing on a machine that has been up for long."""
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    monkeypatch.setattr(build, "Path", lambda name: tmp_path / Path(name).name)
    facts = plan_on(CPU, monkeypatch)
    per_block = bytes_per_token(facts.model, facts.cache_dtype) * facts.block_size
    options = EngineConfig.from_options("folder", {"max_num_seqs": 10**9, "max_model_len": 64})
    assert build.cache_blocks(options, facts) == given // per_block


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"device is 'cuda', which cannot be used here \(.+\)\. Use 'auto' or 'cpu'"):
        build.plan(EngineConfig(model="folder", device="cuda"), SimpleNamespace(config=LLAMA))


def test_a_device_that_is_neither_a_cpu_nor_cuda_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"device is 'meta', which cannot be used here \(.+\)\. Use 'auto' or 'cpu'"):
        build.plan(EngineConfig(model="folder", device="meta"), SimpleNamespace(config=LLAMA))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Gemma3ForConditionalGeneration"])
def test_a_family_that_is_not_built_is_named_and_not_the_sizes_that_it_calls_otherwise(name):
    """GPT-2 has ``n_embd``, models of pictures and text have their sizes in ``text_config``."""
    with pytest.raises(CheckpointError, match=f"no model is built for architecture '{name}'; known are Llama"):
        build.plan(EngineConfig(model="folder"), SimpleNamespace(config={"architectures": [name], "n_embd": 768}))


def test_the_backend_is_asked_with_the_facts_of_model_and_cache(monkeypatch):
    """The type is the one that is computed in, not the one that was asked for."""
    asked = []

    def find_backend(name, device_type, facts):
        asked.append((name, device_type, facts))
        return SimpleNamespace(PREFERRED_BLOCK_SIZE=77)

    monkeypatch.setattr(build, "find_backend", find_backend)
    plan = plan_on(CUDA, monkeypatch, capability=(7, 5), attention_backend="flash_attn")
    assert plan.block_size == 77
    assert plan_on(CPU, monkeypatch, block_size=12).block_size == 12
    assert asked == [
        ("flash_attn", "cuda", (16, None, torch.float16)),
        ("auto", "cpu", (16, 12, torch.float32)),
    ]


def test_a_backend_that_cannot_serve_the_model_is_passed_over_or_refused(monkeypatch, caplog):
    pytest.importorskip("triton", reason="triton is not installed")
    wide = LLAMA | {"head_dim": 512}
    assert plan_on(CUDA, monkeypatch, model=LLAMA).backend.__name__.endswith(".paged")
    with caplog.at_level("INFO", logger="nanovllm.ops.attention"):
        assert plan_on(CUDA, monkeypatch, model=wide).backend.__name__.endswith(".sdpa")
    assert "sdpa (triton's kernels take head dimensions up to 256, and this model's is 512)" in caplog.text
    with pytest.raises(ConfigError, match=r"attention_backend is 'triton', but .* is 512; use 'auto' or 'sdpa'"):
        plan_on(CUDA, monkeypatch, model=wide, attention_backend="triton")


def test_deterministic_reaches_the_plan_on_a_gpu_alone(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    assert plan_on(CUDA, monkeypatch, deterministic=True).deterministic
    assert not plan_on(CUDA, monkeypatch).deterministic
    assert not plan_on(CPU, monkeypatch, deterministic=True).deterministic


@pytest.mark.parametrize("name", ["sdpa", "flash", "flash3"])
def test_a_backend_whose_bits_depend_on_the_step_refuses_deterministic(name, monkeypatch):
    backend = SimpleNamespace(PREFERRED_BLOCK_SIZE=16, __name__=f"nanovllm.ops.attention.{name}")
    monkeypatch.setattr(build, "find_backend", lambda *given: backend)
    with pytest.raises(
        ConfigError, match=rf"deterministic is True; it must .* this is .*\.{name}\. Use .*'auto'"
    ) as caught:
        plan_on(CUDA, monkeypatch, deterministic=True)
    assert (caught.value.parameter, caught.value.value) == ("deterministic", True)
    assert not plan_on(CPU, monkeypatch, deterministic=True).deterministic


def test_only_one_backend_says_that_it_can():
    pytest.importorskip("triton", reason="triton is not installed")
    able = {"paged": True, "sdpa": False}
    for name, expected in able.items():
        module = build.find_backend("triton" if name == "paged" else name, "cpu") if expected else None
        module = module or build.find_backend("sdpa", "cpu")
        assert getattr(module, "DETERMINISTIC", False) is expected


@pytest.mark.parametrize("number", [33, -1])
def test_log_probabilities_beyond_the_kernels_refuse_deterministic(number, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(ConfigError, match=rf"max_logprobs is {number}; .* at most 32 .* Lower it") as caught:
        plan_on(CUDA, monkeypatch, deterministic=True, max_logprobs=number)
    assert caught.value.parameter == "max_logprobs"
    assert plan_on(CUDA, monkeypatch, deterministic=True, max_logprobs=32).deterministic


LEVERS = r"max_num_batched_tokens=\d+, max_num_seqs=\d+ or max_model_len=64, which the working memory of a step follows"


def test_weights_that_do_not_fit_are_refused_with_the_levers(monkeypatch):
    def draw(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")

    monkeypatch.setattr(build, "draw_weights", draw)
    config = EngineConfig(model="folder", device="cpu", load_format="dummy")
    checkpoint = SimpleNamespace(config=LLAMA)
    with pytest.raises(ConfigError, match=rf"Tried to allocate 16.00 GiB.*Lower {LEVERS}, or gpu_memory_utiliz.*=0.9;"):
        build.build_runner(config, checkpoint, build.plan(config, checkpoint), None)


def test_a_cache_without_room_is_refused_with_the_levers(monkeypatch):
    facts = plan_on(CUDA, monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30_000_000, 100_000_000))
    config = EngineConfig(model="folder", gpu_memory_utilization=0.8, max_num_seqs=9)
    assert build.cache_blocks(config, facts, working=9_000_000) > 0
    with pytest.raises(ConfigError, match=r"^-10000000 bytes are left .* gpu_memory_utilization=0.8 ") as caught:
        build.cache_blocks(config, facts, working=20_000_000)
    assert re.search(rf"lower {LEVERS}; on a GPU take kv_cache_dtype='fp8'", str(caught.value))

"""Two GPUs give what one gives, with the sums over ranks inside CUDA graphs, and a lost rank frees the other."""

import json
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, EngineError, SamplingParams
from nanovllm.config import ModelConfig
from nanovllm.loader import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CONFIG = dict(
    architectures=["Qwen3ForCausalLM"], vocab_size=515, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, rms_norm_eps=1e-6,
    rope_theta=1e4, hidden_act="silu", torch_dtype="bfloat16", tie_word_embeddings=True,
)  # fmt: skip
OPTIONS = dict(device="cuda", skip_tokenizer_init=True, num_gpu_blocks_override=512, use_tqdm_on_load=False)
PROMPTS = [[(7 * i + 3 * j) % 515 for j in range(5 + 13 * i)] for i in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    whole = build_model(ModelConfig.from_dict(CONFIG), 8, torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(place.shape) if "norm" in name else torch.randn(place.shape) * 0.08
        for name, place in whole.places.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answers(model, size, params=GREEDY, **options):
    with LLM(model, tensor_parallel_size=size, **{**OPTIONS, **options}) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        again = llm.generate(PROMPTS, params, use_tqdm=False)
    found = [(sample.token_ids, sample.logprobs) for output in outputs for sample in output.outputs]
    return found, [sample.token_ids for output in again for sample in output.outputs]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_two_gpus_score_as_one(model, options):
    one, two = answers(model, 1, **options)[0], answers(model, 2, **options)[0]
    alike = 0
    for (tokens, logprobs), (others, scores) in zip(two, one, strict=True):
        for token, other, ours, theirs in zip(tokens, others, logprobs, scores, strict=True):
            assert abs(ours[token].logprob - theirs[other].logprob) < 0.25
            if token != other:
                break
            alike += 1
    assert alike > 0.5 * len(PROMPTS) * GREEDY.max_tokens


def test_ranks_go_on_drawing_the_same(model):
    """Tokens stay on the devices: a rank that drew another one would spoil what the other computes next."""
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=64, ignore_eos=True, seed=3, logprobs=0)
    one, two = answers(model, 1, params)[0], answers(model, 2, params)[0]
    mean = [sum(step[token].logprob for tokens, steps in found for token, step in zip(tokens, steps, strict=True))
            / sum(len(tokens) for tokens, _ in found) for found in (one, two)]  # fmt: skip
    assert mean[0] == pytest.approx(mean[1], abs=0.15)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_engine_and_a_new_one_starts(model, number):
    llm = LLM(model, tensor_parallel_size=2, **OPTIONS)
    (worker,) = llm.llm_engine._runner._group._workers
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    timer = threading.Timer(0.3, lambda: os.kill(worker.process.pid, number))
    timer.start()
    started = time.monotonic()
    with pytest.raises(EngineError, match="rank 1"):
        for _ in range(100):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert time.monotonic() - started < 12
    assert worker.process.poll() is not None
    llm.close()
    del llm
    assert len(answers(model, 2)[0]) == len(PROMPTS)


def test_memory_comes_back(model):
    answers(model, 2)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        answers(model, 2)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > before - 2**28


def test_the_cache_is_sized_by_all_ranks(model):
    options = {**OPTIONS, "num_gpu_blocks_override": None, "gpu_memory_utilization": 0.3}
    with LLM(model, tensor_parallel_size=2, **options) as llm:
        assert llm.llm_engine.scheduler.blocks.num_blocks > 100
        assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == len(PROMPTS)


def test_each_replica_says_the_memory_of_its_own_device(model):
    """Answers come from a thread that has chosen no device."""
    with LLM(model, data_parallel_size=2, **OPTIONS) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        figures = llm.get_metrics(per_replica=True)
        found = {
            (figure.labels["engine"], figure.labels["kind"]): figure.value
            for figure in figures if figure.name == "nanovllm:device_memory_bytes"
        }  # fmt: skip
        assert set(found) == {(engine, kind) for engine in "01" for kind in ("allocated", "reserved", "free")}
        assert all(found[engine, "reserved"] >= found[engine, "allocated"] > 10**6 for engine in "01")
        assert found["0", "allocated"] == pytest.approx(found["1", "allocated"], rel=0.1)
        drawn = sum(each.value for each in llm.get_metrics() if each.name == "nanovllm:generation_tokens")
        assert drawn == GREEDY.max_tokens * len(PROMPTS)

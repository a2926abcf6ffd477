"""Decode steps as CUDA graphs, submitted while the step before runs: the same answers as without."""

import json
import random
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.cuda_graphs import _let_go

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1009,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def open_llm(folder: Path, **options) -> LLM:
    defaults = dict(load_format="dummy", skip_tokenizer_init=True, dtype="float32", use_tqdm_on_load=False,
                    kv_cache_memory_bytes=1 << 30, device="cuda")  # fmt: skip
    return LLM(folder, **{**defaults, **options})


def work(number: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Mixed lengths and every kind of sampling."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1009) for _ in range(rng.choice([1, 2, 17, rng.randint(1, 300)]))] for _ in range(number)]
    kinds = [
        dict(temperature=0.0),
        dict(temperature=0.8, seed=5),
        dict(temperature=1.0, top_p=0.9, seed=6),
        dict(temperature=0.7, top_k=20, seed=7),
        dict(temperature=0.0, logprobs=3),
        dict(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2),
        dict(temperature=1.0, seed=9, repetition_penalty=1.3, logit_bias={5: 2.0, 6: -3.0}, min_p=0.05),
        dict(temperature=0.0, allowed_token_ids=list(range(100, 130)), frequency_penalty=2.0, logprob_token_ids=[7]),
        dict(temperature=0.9, seed=8, min_tokens=9, max_tokens=30, stop_token_ids=list(range(0, 1009, 2))),
    ]
    params = [SamplingParams(**{"max_tokens": rng.randint(1, 40), "ignore_eos": True, **rng.choice(kinds)})
              for _ in range(number)]  # fmt: skip
    return prompts, params


def answers(llm: LLM, prompts, params) -> list[tuple]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].finish_reason, output.token_ids) for output in outputs]


@pytest.mark.parametrize("number", [1, 2, 5, 13, 33, 70])
def test_graphs_and_overlap_change_no_token(folder, number):
    prompts, params = work(number, seed=number)
    with open_llm(folder) as llm, open_llm(folder, enforce_eager=True) as eager:
        found = answers(llm, prompts, params)
        assert found == answers(eager, prompts, params)
        assert found == answers(llm, prompts, params), "a second time, from recorded graphs"
        for prompt, param, expected in list(zip(prompts, params, found, strict=True))[:6]:
            assert answers(llm, [prompt], [param]) == [expected], "alone"


def test_preemption_and_chunks_change_no_token(folder):
    prompts, params = work(24, seed=3)
    params = [param.clone() for param in params]
    with open_llm(folder) as llm:
        expected = answers(llm, prompts, params)
    tight = dict(kv_cache_memory_bytes=None, num_gpu_blocks_override=24, block_size=16, max_num_batched_tokens=48)
    with open_llm(folder, **tight) as llm:
        assert answers(llm, prompts, params) == expected
        assert llm.llm_engine.scheduler.num_preemptions > 0


def test_long_contexts_are_cut_in_graphs_too(folder):
    rng = random.Random(1)
    prompts = [[rng.randrange(1009) for _ in range(length)] for length in (3000, 700, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    with open_llm(folder) as llm, open_llm(folder, enforce_eager=True, attention_backend="sdpa") as plain:
        assert answers(llm, prompts, params) == answers(plain, prompts, params)


def test_a_prefix_in_common_is_read_once_in_graphs_too(folder):
    rng = random.Random(2)
    prefix = [rng.randrange(1009) for _ in range(1100)]
    prompts = [prefix + [rng.randrange(1009) for _ in range(rng.randint(1, 200))] for _ in range(40)]
    prompts += [[rng.randrange(1009) for _ in range(length)] for length in (1, 700)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with open_llm(folder) as llm, open_llm(folder, enforce_eager=True, attention_backend="sdpa") as plain:
        answers(llm, [prefix], SamplingParams(max_tokens=1))  # from now on its blocks are known
        assert answers(llm, prompts, params) == answers(plain, prompts, params)
        graphs = llm.llm_engine._runner._graphs
        assert any(key.cuts.shared for key in graphs._recorded), "no step shared anything"
        assert any(not key.cuts.shared for key in graphs._recorded)


@pytest.mark.alone
def test_the_memory_a_step_takes_is_set_aside(folder):
    total = torch.cuda.mem_get_info()[1]
    for _ in range(2):  # the first one leaves libraries their workspace
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with open_llm(folder, kv_cache_memory_bytes=None, gpu_memory_utilization=0.2, max_num_seqs=64) as llm:
            prompts, params = work(128, seed=9)
            answers(llm, prompts, params)
            torch.cuda.synchronize()
            assert torch.cuda.max_memory_allocated() <= 0.2 * total
    assert torch.cuda.memory_allocated() <= before + (1 << 20), "memory is not given back"


def test_the_hosts_memory_is_kept_from_others_until_the_last_step_has_ended():
    """An engine may go while a step is under way, which will still read its message and write its tokens."""
    here = torch.zeros(5000, dtype=torch.int32, pin_memory=True)
    there, place = torch.zeros(1, dtype=torch.int32, device="cuda"), here.data_ptr()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    _let_go(((there[0], here[0]),), torch.cuda.current_stream())
    del here
    assert torch.zeros(5000, dtype=torch.int32, pin_memory=True).data_ptr() != place
    torch.cuda.synchronize()

"""NaN on a GPU: a model with one broken embedding ends the requests that meet it, alone, in graphs and a step ahead."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import ModelConfig
from nanovllm.loader import build_model, parameter_places

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BROKEN = 77
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1009,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
KINDS = {
    "greedy": dict(temperature=0.0),
    "drawn": dict(temperature=1.0),
    "filtered": dict(temperature=1.0, top_p=0.9, top_k=40, min_p=0.01),
    "scored": dict(temperature=1.0, logprobs=3),
    "penalised": dict(temperature=1.0, presence_penalty=1.0),
}


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
    tensors["model.embed_tokens.weight"][BROKEN] = torch.nan
    save_file(tensors, made / "model.safetensors")
    return made


def ask(kind: str, tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(**{**dict(max_tokens=tokens, ignore_eos=True, seed=5), **KINDS[kind], **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"num_gpu_blocks_override": 12}], ids=str)
def test_nan_ends_the_requests_that_meet_it_and_no_others(folder: Path, kind: str, options: dict) -> None:
    generator = torch.Generator().manual_seed(1)
    good = [[t for t in torch.randint(0, 1009, (size,), generator=generator).tolist() if t != BROKEN] + [1]
            for size in (1, 15, 16, 40, 70)]  # fmt: skip
    never = {"logit_bias": {BROKEN: -100.0}}
    settings = {"block_size": 16, "num_gpu_blocks_override": 256, **options}
    with LLM(folder, device=DEVICE, dtype="float32", skip_tokenizer_init=True, **settings) as llm:
        expected = [output.token_ids for output in llm.generate(good, ask(kind, 24, **never), use_tqdm=False)]
        for _ in range(2):
            # one meets it in its prompt, one draws it and meets it in its first decode
            prompts = [good[0], [*good[3], BROKEN, 2], good[1], good[3], good[2], *good[3:]]
            params = [ask(kind, 24, **never)] * 7
            params[3] = ask(kind, 24, allowed_token_ids=[BROKEN])
            outputs = llm.generate(prompts, params, use_tqdm=False)
            reasons = [output.outputs[0].finish_reason for output in outputs]
            assert reasons == ["length", "error", "length", "error", "length", "length", "length"]
            assert (outputs[1].token_ids, outputs[3].token_ids) == ([], [BROKEN])
            assert [outputs[place].token_ids for place in (0, 2, 4, 5, 6)] == expected
        assert llm.llm_engine.scheduler.blocks.num_held == 0
        assert [output.token_ids for output in llm.generate(good, ask(kind, 24, **never), use_tqdm=False)] == expected

"""Real models against float32 references that transformers computed from the same files.

The expected tokens and log-probabilities were made with transformers 5.24 and torch 2.13 on a CPU: weights
expanded to float32, eager attention, greedy, end tokens ignored. The smallest gap between best and second token is
0.0048, a hundred times what rounding moves, so tokens must be equal.
"""

import json
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams

REFERENCES = Path(__file__).parent / "references"
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5, skip_special_tokens=False)


def samples(name: str) -> list[dict]:
    return json.loads((REFERENCES / f"{name}.json").read_text(encoding="utf-8"))


def check(llm: LLM, name: str) -> None:
    for sample in samples(name):
        if sample["messages"]:
            (output,) = llm.chat(sample["messages"], GREEDY, use_tqdm=False)
        else:
            (output,) = llm.generate(sample["prompt"], GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == sample["prompt_token_ids"]
        assert output.token_ids == sample["generated_token_ids"]
        assert output.text == sample["generated_text"]
        for found, expected in zip(output.outputs[0].logprobs, sample["top5"], strict=True):
            for entry in expected:
                assert found[entry["id"]].logprob == pytest.approx(entry["logprob"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3, "block_size": 4}], ids=["plain", "chunked"])
def test_smollm2_equals_the_reference(smollm2_path: Path, options: dict) -> None:
    with LLM(smollm2_path, dtype="float32", use_tqdm_on_load=False, **options) as llm:
        check(llm, "smollm2")


@pytest.mark.slow
def test_gemma3_equals_the_reference(gemma3_path: Path) -> None:
    with LLM(gemma3_path, dtype="float32", use_tqdm_on_load=False) as llm:
        check(llm, "gemma3")


@pytest.mark.slow
def test_the_built_in_name_stands_for_the_file(smollm2_path: Path) -> None:
    torch.set_num_threads(2)  # as users have it: all else here runs on one
    with LLM("smollm2-135m-instruct", use_tqdm_on_load=False) as llm:
        (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=1))
        assert output.text == " Paris"


@pytest.mark.slow
def test_prompts_of_one_call_do_not_change_each_other(smollm2_path: Path) -> None:
    prompts = [sample["prompt_token_ids"] for sample in samples("smollm2")]
    expected = [sample["generated_token_ids"] for sample in samples("smollm2")]
    with LLM(smollm2_path, dtype="float32", use_tqdm_on_load=False, block_size=16, num_gpu_blocks_override=9) as llm:
        outputs = llm.generate(prompts * 3, GREEDY, use_tqdm=False)
        assert [output.token_ids for output in outputs] == expected * 3
        assert llm.llm_engine.scheduler.num_preemptions > 0, "the pool was meant to be too small for all"


@pytest.mark.slow
def test_alone_and_together_agree_to_the_last_bit(smollm2_path: Path) -> None:
    """As long as no prompt is cut: rows of linear layers and of a decode's attention do not know each other.

    On one thread: on several, MKL's small products inside attention differ in the last bit by the thread that runs
    them.
    """
    assert torch.get_num_threads() == 1
    prompts = [sample["prompt_token_ids"] for sample in samples("smollm2")] + [list(range(100, 230))]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    with LLM(smollm2_path, use_tqdm_on_load=False, enable_prefix_caching=False) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
        together = [output.outputs[0] for output in llm.generate(prompts[::-1], params, use_tqdm=False)][::-1]
    assert [output.token_ids for output in alone] == [output.token_ids for output in together]
    assert [output.logprobs for output in alone] == [output.logprobs for output in together]

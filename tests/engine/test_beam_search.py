"""Beam search against transformers' on a tiny random model, and its scores, ends and refusals."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from nanovllm import BeamSearchParams, SamplingParams
from nanovllm.errors import ConfigError, RequestError, UnknownOptionError

PROMPTS = [[72, 101, 108], [5, 6], [9] * 17]


@pytest.fixture(scope="module")
def oracle(folders):
    return LlamaForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32, attn_implementation="eager")


def theirs(model, prompt, width, length, penalty=1.0):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=length, min_new_tokens=length, length_penalty=penalty, return_dict_in_generate=True,
            output_scores=True, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return found.sequences.tolist(), (found.sequences_scores * length**penalty).tolist()


@pytest.mark.parametrize(("width", "length"), [(3, 6), (2, 8), (4, 7), (7, 12)])
@pytest.mark.parametrize("options", [{}, dict(enable_prefix_caching=False)], ids=str)
def test_the_beams_are_those_of_transformers(open_llm, oracle, width, length, options):
    llm = open_llm(**options)
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True))
    for prompt, output in zip(PROMPTS, found, strict=True):
        sequences, scores = theirs(oracle, prompt, width, length)
        assert [beam.tokens for beam in output.sequences] == sequences
        assert [beam.cum_logprob for beam in output.sequences] == pytest.approx(scores, abs=1e-3)
        for beam in output.sequences:
            assert beam.finish_reason == "length" and len(beam.logprobs) == length
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)


def test_one_beam_is_greedy(open_llm):
    llm = open_llm()
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=1, max_tokens=9, ignore_eos=True))
    assert [output.sequences[0].tokens for output in found] == [out.prompt_token_ids + out.token_ids for out in greedy]


def test_an_end_id_ends_a_beam(open_llm):
    llm = open_llm(max_logprobs=-1)
    width, length = 20, 3
    prompt = PROMPTS[0]
    first = llm.beam_search(prompt, BeamSearchParams(width, 1, ignore_eos=True))[0].sequences
    end = first[2].tokens[-1]
    llm.llm_engine.limits = replace(llm.llm_engine.limits, eos_token_ids=frozenset({end}))
    for include, penalty in itertools.product((False, True), (0.0, 1.0)):
        params = BeamSearchParams(width, length, length_penalty=penalty, include_stop_str_in_output=include)
        (output,) = llm.beam_search(prompt, params)
        scores = []
        for beam in output.sequences:
            ended = beam.finish_reason == "stop"
            own = beam.tokens[len(prompt) :]
            assert (own[-1:] == [end]) == (ended and include) and end not in own[:-1]
            drawn = own if include or not ended else [*own, end]
            assert ended or len(own) == length
            total = 0.0
            for place, token in enumerate(drawn):
                assert token in beam.logprobs[place]
                total += beam.logprobs[place][token].logprob
            assert beam.cum_logprob == pytest.approx(total)
            scores.append(total / (len(prompt) + len(drawn) - ended) ** penalty)
        assert scores == sorted(scores, reverse=True) and len(scores) == width
        assert {beam.finish_reason for beam in output.sequences} >= {"stop"}


def test_prompts_of_all_kinds_and_the_end_of_the_context(open_llm):
    llm = open_llm(max_model_len=20)
    params = BeamSearchParams(beam_width=2, max_tokens=30, ignore_eos=True)
    found = llm.beam_search(["hé", [1, 2], {"prompt_token_ids": [9] * 19, "cache_salt": "s"}], params)
    assert [len(beam.tokens) for output in found for beam in output.sequences] == [20] * 6
    assert llm.beam_search([], params) == []
    (output,) = open_llm(skip_tokenizer_init=True).beam_search([1], params)
    assert output.sequences[0].text is None


def test_what_is_refused(open_llm, tiny):
    llm = open_llm()
    for wrong in (dict(beam_width=0), dict(max_tokens=0), dict(beam_width=1.5), dict(length_penalty=math.nan)):
        with pytest.raises(RequestError) as caught:
            BeamSearchParams(**dict(dict(beam_width=2, max_tokens=2), **wrong))
        assert caught.value.parameter in wrong
    with pytest.raises(UnknownOptionError, match="beam_width"):
        BeamSearchParams(beam_wdth=2, max_tokens=2)
    for other in (None, SamplingParams()):
        with pytest.raises(RequestError, match="must be BeamSearchParams"):
            llm.beam_search([1], other)
    with pytest.raises(RequestError, match="max_logprobs=20"):
        llm.beam_search([1], BeamSearchParams(11, 2))
    with pytest.raises(RequestError, match="no tokens"):
        llm.beam_search([[1], []], BeamSearchParams(2, 2))
    tiny.assert_idle(llm)


def test_beams_that_outgrow_the_pool_end_there_as_requests_do(open_llm):
    prompt = list(range(20))
    params = BeamSearchParams(beam_width=2, max_tokens=30, ignore_eos=True)
    small = open_llm(num_gpu_blocks_override=4)
    (found,) = small.beam_search(prompt, params)
    (alone,) = small.generate([prompt], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    (expected,) = open_llm().beam_search(prompt, BeamSearchParams(2, 13, ignore_eos=True))
    assert len(alone.token_ids) == 13
    assert [beam.tokens for beam in found.sequences] == [beam.tokens for beam in expected.sequences]
    assert [beam.finish_reason for beam in found.sequences] == ["length", "length"]


def test_a_beam_that_gets_no_token_says_why(open_llm, monkeypatch):
    """Its logits hold NaN, or pins leave no room for it; the other prompts' beams are what they were."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    llm = open_llm(num_gpu_blocks_override=6)
    (expected,) = llm.beam_search([4, 5], params)
    logits, calls = llm._built.model.logits, itertools.count()

    def spoiled(hidden):
        found = logits(hidden)
        if next(calls) == 0:
            found[0, 3] = torch.nan
        return found

    with monkeypatch.context() as patch:
        patch.setattr(llm._built.model, "logits", spoiled)
        bad, good = llm.beam_search([[1, 2, 3], [4, 5]], params)
    (beam,) = bad.sequences
    assert (beam.tokens, beam.finish_reason) == ([1, 2, 3], "error") and good == expected
    with llm.cache_prefix(list(range(40))):
        ((beam,),) = (output.sequences for output in llm.beam_search([100] * 20, params))
    assert (beam.tokens, beam.finish_reason) == ([100] * 20, "length")


def test_logits_are_no_scores(open_llm):
    for mode in ("raw_logits", "processed_logits"):
        with pytest.raises(ConfigError, match="beam search needs log-probabilities"):
            open_llm(logprobs_mode=mode).beam_search([1], BeamSearchParams(2, 2))

"""Penalties, biases, bans and log-probability modes through the public class: each request has its own."""

import json
import random
import shutil

import pytest
from tokenizers import pre_tokenizers

from nanovllm import RequestError, SamplingParams
from nanovllm.errors import ConfigError

PROMPT = [72, 101, 108, 108, 111]


def greedy(tokens: int = 12, **changes) -> SamplingParams:
    return SamplingParams(**{**dict(temperature=0.0, max_tokens=tokens, ignore_eos=True), **changes})


def run(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def one(llm, params, prompt=PROMPT):
    return run(llm, [prompt], params)[0].outputs[0]


KINDS = [
    dict(), dict(presence_penalty=1.0, frequency_penalty=0.5),
    dict(repetition_penalty=1.5), dict(repetition_penalty=0.8),
    dict(logit_bias={40: 3.0, 41: -3.0}), dict(allowed_token_ids=list(range(60, 90))), dict(bad_words=["a", "b c"]),
    dict(min_p=0.3), dict(min_tokens=5, stop_token_ids=list(range(0, 256, 3)), frequency_penalty=0.3),
    dict(frequency_penalty=-1.0, top_p=0.8, logprobs=2, logprob_token_ids=[7]),
]  # fmt: skip


def test_each_request_of_a_mixed_batch_has_its_own_rules(open_llm):
    """Together, cut, preempted and found in the cache as alone."""
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(1, 20))] for _ in range(20)]
    params = [
        SamplingParams(temperature=place % 2 * 0.9, seed=place, max_tokens=16, ignore_eos=True, **KINDS[place // 2])
        for place in range(20)
    ]
    before = [param.clone() for param in params]
    llm = open_llm()
    together = [output.token_ids for output in run(llm, prompts, params)]
    assert params == before, "a caller's object is changed"
    assert [output.token_ids for output in run(llm, prompts, params)] == together
    alone = open_llm(enable_prefix_caching=False)
    for place in range(20):
        assert one(alone, params[place], prompts[place]).token_ids == together[place], params[place]
    tight = open_llm(num_gpu_blocks_override=12, max_num_batched_tokens=16)
    assert [output.token_ids for output in run(tight, prompts, params)] == together
    assert tight.llm_engine.scheduler.num_preemptions > 0


def test_penalties_act_on_what_came_before(open_llm):
    llm = open_llm()
    loops = one(llm, greedy(40, frequency_penalty=-2.0)).token_ids
    assert len(set(loops)) == 1, "a token that gains by coming comes for ever"
    assert len(set(one(llm, greedy(40, presence_penalty=2.0, frequency_penalty=2.0)).token_ids)) > 30
    (first,) = one(llm, greedy(1)).token_ids
    prompt = [*PROMPT, first]
    assert one(llm, greedy(1, repetition_penalty=1e9), prompt).token_ids[0] not in prompt
    free = one(llm, greedy(1), prompt).token_ids
    assert one(llm, greedy(1, presence_penalty=2.0, frequency_penalty=2.0), prompt).token_ids == free


def test_bias_allowed_ids_and_min_tokens(open_llm, tiny):
    llm = open_llm()
    assert one(llm, greedy(logit_bias={33: 100})).token_ids == [33] * 12
    best = one(llm, greedy(1)).token_ids[0]
    assert one(llm, greedy(1, logit_bias={best: -1000})).token_ids != [best]
    allowed = [65, 70, 200]
    for temperature in (0.0, 2.0):
        assert set(one(llm, greedy(30, temperature=temperature, allowed_token_ids=allowed)).token_ids) <= set(allowed)
    params = greedy(30, min_tokens=4, stop_token_ids=[66], allowed_token_ids=[66, 67], logit_bias={66: 50})
    found = one(llm, params)
    assert found.token_ids == [67] * 4 + [66] and found.stop_reason == 66
    tiny.assert_idle(llm)


def test_bad_words_do_not_come(open_llm):
    """The tokenizer has a token for each byte, so these are of one, two and three tokens."""
    llm = open_llm()
    want = {"logit_bias": dict.fromkeys(llm.get_tokenizer().encode("abc"), 60.0), "temperature": 2.0}
    free = "".join(one(llm, greedy(60, seed=seed, **want)).text for seed in range(3))
    words = ["cab", "bb", "ac"]
    assert all(word in free for word in words)
    for seed in range(3):
        text = one(llm, greedy(60, seed=seed, bad_words=words, **want)).text
        assert set(text) == set("abc") and not any(word in text for word in words)
    assert "b" not in one(llm, greedy(60, bad_words=["b"], **want)).text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rules", [
    dict(bad_words=["aa", "ab"], allowed_token_ids=["a", "b"]),  # one is left at first
    dict(bad_words=["aa"], allowed_token_ids=["!", "a"], min_tokens=4, stop_token_ids=["!"]),
    dict(bad_words=["!!"], allowed_token_ids=["!"]),  # the id 0, which a row of -inf alone gives
], ids=["words", "end", "zero"])  # fmt: skip
def test_a_request_whose_rules_leave_no_token_ends_with_an_error(open_llm, tiny, rules, temperature):
    """Alone: others of its steps go on, and nothing that is not allowed is ever given out."""
    llm = open_llm()
    encode = llm.get_tokenizer().encode
    known = {name: encode("".join(value)) if "ids" in name else value for name, value in rules.items()}
    asked = greedy(9, temperature=temperature, seed=3, ignore_eos=True, **known)
    other = greedy(9)
    (expected,) = run(llm, [PROMPT], other)
    broken, whole = run(llm, [PROMPT, PROMPT], [asked, other])
    assert whole.token_ids == expected.token_ids
    found = broken.outputs[0]
    assert found.finish_reason == "error" and found.finished()
    assert set(found.token_ids) <= set(known["allowed_token_ids"]) and len(found.token_ids) < 9
    assert not any(word in found.text for word in rules["bad_words"])
    tiny.assert_idle(llm)


def test_greedy_samples_are_all_the_same(open_llm):
    llm = open_llm()
    (expected,) = run(llm, [PROMPT], greedy(8, logprobs=1))
    (output,) = run(llm, [PROMPT], greedy(8, logprobs=1, n=3))
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    for sample in output.outputs:
        assert (sample.text, sample.token_ids) == (expected.text, expected.token_ids)
        assert sample.cumulative_logprob == pytest.approx(expected.outputs[0].cumulative_logprob, abs=1e-4)


def test_log_probabilities_of_what_was_drawn_from(open_llm):
    rules = dict(logprobs=2, logit_bias={33: 100}, logprob_token_ids=[34])
    raw, processed = (
        one(open_llm(logprobs_mode=mode), greedy(3, **rules)) for mode in ("raw_logprobs", "processed_logprobs")
    )
    assert raw.token_ids == processed.token_ids == [33] * 3
    assert all(entry[33].rank > 1 and entry[33].logprob < -1 for entry in raw.logprobs)
    assert all(entry[33].rank == 1 and entry[33].logprob == pytest.approx(0.0) for entry in processed.logprobs)
    assert processed.cumulative_logprob == pytest.approx(0.0)
    assert raw.cumulative_logprob == pytest.approx(sum(entry[33].logprob for entry in raw.logprobs))
    assert (
        raw.logprobs[0][34].decoded_token == open_llm().get_tokenizer().decode([34]) and raw.logprobs[0][34].logprob < 0
    )
    logits = one(open_llm(logprobs_mode="raw_logits"), greedy(3, **rules)).logprobs[0]
    biased = one(open_llm(logprobs_mode="processed_logits"), greedy(3, **rules)).logprobs[0]
    assert biased[33].logprob == pytest.approx(logits[33].logprob + 100, abs=1e-4)
    gaps = [entry[33].logprob - entry[34].logprob for entry in (logits, raw.logprobs[0])]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-4)
    with pytest.raises(ConfigError, match="logprobs_mode is 'raw'; it must be one of raw_logprobs"):
        open_llm(logprobs_mode="raw")


def test_all_log_probabilities(open_llm, tiny):
    (entry,) = one(open_llm(max_logprobs=-1), greedy(1, logprobs=-1)).logprobs
    assert set(entry) == set(range(tiny.vocab))
    with pytest.raises(RequestError, match="logprobs is -1; it must not exceed max_logprobs=20"):
        one(open_llm(), greedy(1, logprobs=-1))


A = sorted(pre_tokenizers.ByteLevel.alphabet()).index("a")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (dict(logit_bias={259: 1.0}), "logit_bias is 259; it must hold integers from 0 to 258"),
        (dict(allowed_token_ids=[3, 259]), "allowed_token_ids is 259"),
        (dict(logprob_token_ids=[259]), "logprob_token_ids is 259"),
        (
            dict(allowed_token_ids=[256], min_tokens=1, ignore_eos=False),
            "allowed_token_ids is .256.; it must hold more",
        ),
        (dict(allowed_token_ids=[7], min_tokens=1, stop_token_ids=[7]), "allowed_token_ids is .7.; it must hold more"),
        (dict(allowed_token_ids=[A], bad_words=["a"]), "allowed_token_ids is .*; it must hold more than bad_words"),
        (dict(min_tokens=1, stop_token_ids=range(259)), "stop_token_ids is .*; it must leave"),
        (
            dict(min_tokens=1, stop_token_ids=[*range(A), *range(A + 1, 259)], bad_words=["a"]),
            "stop_token_ids is .*; it must leave",
        ),
    ],
)
def test_what_no_model_could_do_is_refused(open_llm, tiny, rules, message):
    llm = open_llm()
    with pytest.raises(RequestError, match=message) as caught:
        one(llm, greedy(**rules))
    assert caught.value.parameter == message.split()[0]
    tiny.assert_idle(llm)


@pytest.mark.parametrize("penalty", [1e-30, 1e30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_strongest_penalty_leaves_numbers(open_llm, tiny, penalty, temperature):
    """A penalty that is 0 or infinite in float32 makes NaN of a banned token, or of a logit of 0."""
    asked = greedy(repetition_penalty=penalty, temperature=temperature, seed=1, min_tokens=3, logit_bias={1: 1.0})
    assert one(open_llm(), asked, [tiny.end, 5, 1]).finish_reason in ("stop", "length")


def test_bad_words_need_a_tokenizer(open_llm):
    with pytest.raises(RequestError, match="bad_words is .* needs a tokenizer") as caught:
        one(open_llm(skip_tokenizer_init=True), greedy(bad_words=["a"]))
    assert caught.value.parameter == "bad_words"


def test_a_models_own_penalty_and_min_p_are_taken(open_llm, folders, tmp_path, monkeypatch):
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.2, "min_p": 0.1}))
    monkeypatch.setitem(folders, "llama", folder)
    found = open_llm().get_default_sampling_params()
    assert (found.repetition_penalty, found.min_p) == (1.2, 0.1)

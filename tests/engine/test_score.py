"""``LLM.score``: the log-probabilities of given continuations are those of a prompt that holds them."""

import math

import pytest
import torch

from nanovllm import ConfigError, RequestError, SamplingParams
from nanovllm.llm import LLM


def forced(llm, tokens, start):
    """What the model thinks of ``tokens[start:]``, and whether each is its first choice."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    entries = llm.generate([tokens], asked, use_tqdm=False)[0].prompt_logprobs[start:]
    found = [entry[token] for entry, token in zip(entries, tokens[start:], strict=True)]
    return [one.logprob for one in found], all(one.rank == 1 for one in found)


def assert_score(llm, score, tokens, start):
    values, greedy = forced(llm, tokens, start)
    assert score.token_ids == tokens[start:] and score.is_greedy is greedy
    assert score.token_logprobs == pytest.approx(values, abs=1e-4)
    assert score.logprob == pytest.approx(math.fsum(values), abs=1e-4)


def test_texts_and_ids_one_and_many(open_llm):
    llm = open_llm()
    encode = llm.get_tokenizer().encode
    prompt = "The quick brown fox"
    ids = encode(prompt)
    results = llm.score(
        [prompt, ids, {"prompt": prompt, "cache_salt": "s"}, {"prompt_token_ids": ids}, "x"],
        [" jumps", [" runs", [70, 71]], [" over", " dogs and cats"], [7], [[9], [8, 7]]],
    )
    assert [isinstance(each, list) for each in results] == [False, True, True, False, True]
    flat = [one for each in results for one in (each if isinstance(each, list) else [each])]
    wanted = [encode(" jumps"), encode(" runs"), [70, 71], encode(" over"), encode(" dogs and cats"), [7], [9], [8, 7]]
    assert [one.token_ids for one in flat] == wanted
    for one, tokens in zip(flat, wanted, strict=True):
        first = encode("x") if tokens in ([9], [8, 7]) else ids
        assert_score(llm, one, first + tokens, len(first))


def test_a_single_prompt_takes_one_continuation_or_a_list(open_llm):
    llm = open_llm()
    (alone,) = llm.score("ab", "cd")
    ((first, second),) = llm.score([65, 66], ["cd", [70]])
    assert alone.token_ids == first.token_ids and second.token_ids == [70]
    assert llm.score("ab", [70, 71])[0].token_ids == [70, 71] and llm.score({"prompt": "ab"}, "c")[0].token_ids == [66]
    assert llm.score([], []) == [] and llm.score(["ab"], [[]]) == [[]]


def test_the_greedy_continuation_is_called_so(open_llm):
    llm = open_llm()
    prompt = llm.get_tokenizer().encode("Once upon a time")
    asked = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2)
    (output,) = llm.generate([prompt], asked, use_tqdm=False)
    other = [*output.token_ids[:-1], list(output.outputs[0].logprobs[-1])[1]]
    ((greedy, not_greedy),) = llm.score(prompt, [output.token_ids, other])
    assert greedy.is_greedy and not not_greedy.is_greedy
    assert greedy.logprob == pytest.approx(output.outputs[0].cumulative_logprob, abs=1e-4)
    assert greedy.token_logprobs[:-1] == pytest.approx(not_greedy.token_logprobs[:-1], abs=1e-4)


def test_spaces_at_the_end_of_a_prompt_belong_to_the_continuation(open_llm):
    llm = open_llm()
    encode = llm.get_tokenizer().encode
    for prompt, continuation in (("ab  ", "cd"), ("ab\n", "c"), ("ab", " cd")):
        (found,) = llm.score(prompt, continuation)
        assert_score(llm, found, encode(prompt + continuation), len(encode("ab")))


@pytest.fixture
def merging(open_llm, monkeypatch):
    """A tokenizer that makes one token of "ab", so that a prompt is not always the beginning of prompt and more."""
    llm = open_llm()
    tokenizer = llm.get_tokenizer()

    def encode(text, *, add_special_tokens=True):
        return [1 if sign == "*" else ord(sign) for sign in text.replace("ab", "*")]

    monkeypatch.setattr(tokenizer, "encode", encode)
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: [encode(text) for text in texts])
    return llm


def test_a_token_across_the_border_is_cut_where_the_prompt_ends(merging):
    (found,) = merging.score("xa", "bc")
    assert_score(merging, found, [ord("x"), 1, ord("c")], 2)


def test_a_prompt_is_computed_once(open_llm, monkeypatch):
    """But for its last block, which no continuation shares; and only rows of continuations have logits."""
    llm = open_llm()
    rows, computed = [], []
    model = llm._built.model
    plain, submit = model.logits, llm.llm_engine._runner.submit
    monkeypatch.setattr(model, "logits", lambda hidden: rows.append(len(hidden)) or plain(hidden))
    monkeypatch.setattr(
        llm.llm_engine._runner, "submit", lambda output: computed.append(output.num_tokens) or submit(output)
    )
    prompts = [list(range(100, 140)), list(range(60, 100))]
    llm.score(prompts, [[[1], [2, 3], [4]], [5]])
    # the first of each prompt; then the last block's tokens of the first prompt, whose last one tells of the first
    assert computed == [41 + 41, (8 + 2) + (8 + 1)] and sum(rows) == 5 + 4
    found = llm.score(prompts, [[[1], [2, 3], [4]], [5]])
    assert sum(computed[2:]) == 9 + 10 + 9 + 9
    for one, tokens in zip([*found[0], found[1]], ([1], [2, 3], [4], [5]), strict=True):
        assert_score(llm, one, prompts[tokens == [5]] + tokens, 40)


def test_small_pools_take_few_prompts_at_a_time_and_salts_share_nothing(open_llm, monkeypatch):
    llm = open_llm(num_gpu_blocks_override=12)
    computed, submit = [], llm.llm_engine._runner.submit
    monkeypatch.setattr(
        llm.llm_engine._runner, "submit", lambda output: computed.append(output.num_tokens) or submit(output)
    )
    prompts = [list(range(start, start + 33)) for start in (0, 70, 140, 210)]
    llm.score(prompts, [[[1], [2]]] * 4)
    assert sum(computed) == 4 * (34 + 2), "none was evicted before its second continuation"
    llm.score(prompts[0], [[3]])
    before = sum(computed)
    llm.score([{"prompt_token_ids": prompts[0], "cache_salt": salt} for salt in "ab"], [[1], [1]])
    assert sum(computed) - before == 2 * 34
    steps = len(computed)
    llm.score([[7, 8]] * 3, [[1], [2], [3]])
    assert len(computed) == steps + 1, "there is no full block to wait for"


@pytest.mark.parametrize("options", [
    dict(num_gpu_blocks_override=9), dict(enable_prefix_caching=False), dict(max_num_batched_tokens=5),
    dict(num_gpu_blocks_override=14, max_num_batched_tokens=9, max_num_seqs=3),
], ids=str)  # fmt: skip
def test_company_chunks_and_small_pools_change_nothing(open_llm, options):
    prompts = [list(range(start, start + 20 + start % 7)) for start in range(0, 120, 10)]
    continuations = [[[place], [place, 7, 8], [9] * 12][: place % 3 + 1] for place in range(12)]
    expected = open_llm(enable_prefix_caching=False).score(prompts, continuations)
    found = open_llm(**options).score(prompts, continuations)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_ids == other.token_ids and one.is_greedy == other.is_greedy
            assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("prompts", "continuations", "parameter", "message"),
    [
        (["a", "b"], ["c"], "continuations", "must have one entry for each of 2 prompts"),
        (["a", "b"], "cd", "continuations", "must have one entry for each of 2 prompts"),
        ("a", None, "continuations", "must be a text or a list of token ids"),
        ("a", [["b", "c"]], "continuations", "must be a text or a list of token ids"),
        ("a", [1.5], "continuations", "must be a text or a list of token ids"),
        (["a", "b"], ["c", ""], "continuations", "is ''; it must have at least one token"),
        (["a"], [[[]]], "continuations", r"is \[\]; it must have at least one token"),
        ("  ", "a", "prompts", "has no tokens"),
        ("a", "b" * 255, "continuations", "256 tokens long with its prompt'; it must be at most 255 tokens long"),
        ("a" * 300, "b", "continuations", "301 tokens long with its prompt"),
        ("a", [259], "prompt_token_ids", "must hold integers from 0 to 258"),
        ([5.0], ["a"], "prompts", "a prompt is 5.0; it must be a str"),
    ],
)
def test_what_is_refused(open_llm, tiny, monkeypatch, prompts, continuations, parameter, message):
    llm = open_llm()
    monkeypatch.setattr(LLM, "generate", None)  # nothing is computed
    with pytest.raises(RequestError, match=message) as caught:
        llm.score(prompts, continuations)
    assert caught.value.parameter == parameter
    tiny.assert_idle(llm)


def test_a_continuation_may_fill_the_context(open_llm):
    llm = open_llm()
    (found,) = llm.score("a", "b" * 254)
    assert len(found.token_ids) == 254


def test_an_engine_that_gives_logits_cannot_score(open_llm):
    with pytest.raises(ConfigError, match="logprobs_mode is 'raw_logits'; score needs log-probabilities"):
        open_llm(logprobs_mode="raw_logits").score("a", "b")
    with pytest.raises(ConfigError, match="no tokenizer"):
        open_llm(skip_tokenizer_init=True).score("a", "b")
    (found,) = open_llm(skip_tokenizer_init=True).score([1, 2], [3])
    assert found.token_ids == [3]


def test_without_room_for_it_nothing_is_scored(open_llm, tiny):
    """Pins hold the cache: a prompt that was never computed is not certain."""
    llm = open_llm(num_gpu_blocks_override=6)
    with llm.cache_prefix(list(range(40))), pytest.raises(RequestError, match="pins leave no room"):
        llm.score([[9] * 5, [100] * 20], [[3], [5, 6, 7]])
    tiny.assert_idle(llm)
    assert llm.score([[100] * 20], [[5, 6, 7]])[0].logprob < 0


def test_numbers_that_are_none_are_said_to_be_none(open_llm, monkeypatch):
    llm = open_llm()
    (expected,) = llm.score([[4, 5]], [[6]])
    logits = llm._built.model.logits

    def spoiled(hidden):
        found = logits(hidden)
        found[0, 3] = torch.nan
        return found

    monkeypatch.setattr(llm._built.model, "logits", spoiled)
    bad, good = llm.score([[1, 2, 3], [4, 5]], [[5, 6], [6]])
    assert math.isnan(bad.logprob) and len(bad.token_logprobs) == 2 and all(map(math.isnan, bad.token_logprobs))
    assert not bad.is_greedy and good.logprob == pytest.approx(expected.logprob, abs=1e-4)

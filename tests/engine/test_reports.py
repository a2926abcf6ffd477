"""Faults that users of other engines have reported: each behaviour is a test, here or where docs/reports.md says."""

import ast
import asyncio
import re
from pathlib import Path

import pytest

from nanovllm import AsyncLLM, RequestOutputKind, SamplingParams
from nanovllm.errors import RequestError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def run(llm, prompts, params, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(("page", "least"), [("reports.md", 16), ("reliability.md", 19)])
def test_every_report_and_every_promise_names_tests_that_exist(page, least):
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", (DOCS / page).read_text(encoding="utf-8"), re.M)[2:]
    assert len(rows) >= least
    for report, _, tests in rows:
        named = re.findall(r"`([^`]+)::([^`]+)`", tests)
        assert named, f"{report} has no test"
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


@pytest.mark.parametrize("length", [8, 24])
def test_a_prompt_of_whole_blocks_that_the_cache_holds_in_full(open_llm, length):
    """nano-vllm 144: nothing was left to compute. Alone, beside a running request, and twice in one batch."""
    llm, prompt = open_llm(), list(range(40, 40 + length))
    (expected,) = run(open_llm(enable_prefix_caching=False), prompt, GREEDY)
    assert run(llm, prompt, GREEDY)[0].num_cached_tokens == 0
    for output in [*run(llm, prompt, GREEDY), *run(llm, [prompt, [3] * 9, prompt], GREEDY)[::2]]:
        assert output.token_ids == expected.token_ids
        assert output.num_cached_tokens == length - 8


@pytest.mark.parametrize(
    "bad", [[], "", [300], [1] * 300, [1] * 200], ids=["no ids", "no text", "id", "context", "pool"]
)
def test_after_a_refused_prompt_others_are_scheduled(open_llm, tiny, bad):
    """vllm 42381, 7283, 7632: by every way in, and with a request under way."""
    llm = open_llm(num_gpu_blocks_override=16)
    expected = tokens_of(run(llm, [[1, 2, 3]], GREEDY))
    stream = llm.stream([1, 2, 3], GREEDY)
    pieces = [next(stream)]
    prompt = {"prompt": bad} if isinstance(bad, str) else {"prompt_token_ids": bad}
    for ask in (
        lambda: run(llm, prompt, GREEDY),
        lambda: run(llm, [[5], prompt], GREEDY),
        lambda: next(llm.stream(prompt, GREEDY)),
        lambda: llm.llm_engine.add_request("x", bad, GREEDY),
    ):
        with pytest.raises(RequestError):
            ask()
    pieces += stream
    assert [[token for piece in pieces for token in piece.token_ids]] == expected
    assert tokens_of(run(llm, [[1, 2, 3]], GREEDY)) == expected
    tiny.assert_idle(llm)

    async def main():
        async with AsyncLLM(llm) as engine:
            reading = engine.generate([1, 2, 3], GREEDY)
            first = await anext(reading)
            with pytest.raises(RequestError):
                engine.generate(prompt, GREEDY)
            assert [[output async for output in reading][-1].token_ids] == expected
            assert len(first.token_ids) >= 1

    asyncio.run(main())


def test_a_bad_prompt_does_not_change_the_number_of_results(open_llm):
    """vllm 1655: a prompt was dropped, and the answers behind it moved up."""
    llm, good = open_llm(), [[1], [2, 3], [4] * 9]
    for place in range(4):
        with pytest.raises(RequestError, match=f"prompt {place} of 4"):
            run(llm, [*good[:place], [], *good[place:]], GREEDY)
    assert [output.prompt_token_ids for output in run(llm, good, GREEDY)] == good


def test_a_seed_counts_beside_neighbours_without_one(open_llm):
    """vllm 51226. At every place in the batch, filtered or not, with greedy neighbours too."""
    llm = open_llm(num_gpu_blocks_override=400)
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    for options in ({}, dict(top_p=0.8, top_k=30), dict(presence_penalty=1.0)):
        seeded = SamplingParams(seed=11, max_tokens=8, ignore_eos=True, **options)
        (alone,) = run(llm, [1, 2, 3], seeded)
        for place in range(4):
            params = [free, GREEDY, free]
            outputs = run(llm, [[1, 2, 3]] * 4, [*params[:place], seeded, *params[place:]])
            assert outputs[place].token_ids == alone.token_ids
            assert len({tuple(output.token_ids) for output in outputs}) == 4, "the others have their own"


@pytest.mark.parametrize("include", [False, True])
def test_nothing_is_repeated_and_nothing_leaks_while_streaming(open_llm, include):
    """vllm 48853, sglang 31598, vllm PR 3672: stop strings that cross tokens, among characters of several bytes."""
    llm = open_llm()
    texts = 0
    for seed in range(12):
        free = SamplingParams(seed=seed, max_tokens=24, ignore_eos=True, logit_bias={67: 6.0, 162: 4.0})
        (whole,) = run(llm, [7, seed], free)
        place = next((at for at in range(3, len(whole.text) - 2) if "\ufffd" not in whole.text[at : at + 2]), None)
        if place is None:
            continue
        stop = whole.text[place : place + 2]
        params = SamplingParams(
            seed=seed, max_tokens=24, ignore_eos=True, logit_bias={67: 6.0, 162: 4.0}, stop=[stop, stop + "never"],
            include_stop_str_in_output=include,
        )  # fmt: skip
        pieces = list(llm.stream([7, seed], params))
        shown = ""
        for piece in pieces:
            shown += piece.text
            assert whole.text.startswith(shown), "shown, and then taken back"
        end = whole.text.index(stop)
        assert shown == whole.text[: end + 2 * include] == run(llm, [7, seed], params)[0].text
        assert pieces[-1].outputs[0].stop_reason == stop
        texts += 1
    assert texts > 8


def test_a_stop_id_that_is_no_token_is_refused_with_min_tokens_too(open_llm, tiny):
    """gonka PR 1170: the mask of end ids was indexed with it, and the whole engine died."""
    llm = open_llm()
    for token in (tiny.vocab, 10**9, -1):
        for least in (0, 4):
            with pytest.raises(RequestError) as caught:
                run(llm, [[1], [2]], SamplingParams(stop_token_ids=[5, token], min_tokens=least))
            assert caught.value.parameter == "stop_token_ids"
    tiny.assert_idle(llm)
    highest = SamplingParams(temperature=0.0, stop_token_ids=[tiny.vocab - 1], min_tokens=4, max_tokens=6)
    assert len(run(llm, [1], highest)[0].token_ids) >= 4


def test_the_pool_is_full_and_everybody_is_served_all_the_same(open_llm, tiny):
    """nano-vllm 274, PR 277: an assertion, or a retry that never ends."""
    llm = open_llm(num_gpu_blocks_override=6)
    prompts = [[place] * (5 + place) for place in range(8)]
    outputs = run(llm, prompts, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    assert llm.llm_engine.scheduler.num_preemptions > 0
    assert tokens_of(outputs) == [
        run(open_llm(), prompt, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0].token_ids
        for prompt in prompts
    ]
    tiny.assert_idle(llm)


def test_readers_of_final_outputs_get_one_each_in_a_full_pool(open_llm):
    llm = open_llm(num_gpu_blocks_override=6)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)

    async def main():
        async with AsyncLLM(llm) as engine:

            async def read(prompt):
                return [output async for output in engine.generate(prompt, params)]

            found = await asyncio.gather(*(read([place] * 7) for place in range(10)))
            assert [len(outputs) for outputs in found] == [1] * 10
            assert {len(output.token_ids) for (output,) in found} == {30}

    asyncio.run(main())

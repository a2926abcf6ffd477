"""Log-probabilities of prompt tokens: whatever happens to a request, they are those of one prefill, each once.

transformers' own are compared in tests/gpu/test_models.py, on a CPU too.
"""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch

from nanovllm import AsyncLLM, RequestError, RequestOutputKind, SamplingParams, batch
from nanovllm.ops.take_tokens import take_tokens
from nanovllm.outputs import Logprobs, Unscored
from nanovllm.request import Request
from nanovllm.scheduler import Span
from nanovllm.scoring import prompts as room

ATOL = 1e-4
"""What rounding does to a softmax over logits that spread over 1 (about 1e-5), ten times."""


def params(number: int | None = 2, tokens: int = 1, **changes) -> SamplingParams:
    return SamplingParams(
        **{**dict(temperature=0.0, max_tokens=tokens, ignore_eos=True, prompt_logprobs=number), **changes}
    )


def run(llm, prompts, asked):
    return llm.generate(prompts, asked, use_tqdm=False)


def draw_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def assert_same(found, expected, start: int = 0) -> None:
    """The entries behind ``start`` are the expected ones, and there are no others."""
    assert len(found) == len(expected) and list(found[: start + 1]) == [None] * (start + 1)
    for one, other in zip(found[start + 1 :], expected[start + 1 :], strict=True):
        assert next(iter(one)) == next(iter(other))
        for token in set(one) & set(other):
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=ATOL)
        assert len(set(one) & set(other)) >= len(one) - 1  # the last of the best may swap places


@pytest.fixture
def alone(open_llm):
    """Each prompt by itself, in one piece."""

    def compute(prompts, number=2):
        llm = open_llm(enable_prefix_caching=False)
        return [run(llm, [prompt], params(number))[0].prompt_logprobs for prompt in prompts]

    return compute


def test_each_entry_names_the_token_of_its_place_first_and_ranks_it(open_llm):
    (prompt,) = draw_prompts(20)
    everything = run(open_llm(max_logprobs=-1), [prompt], params(-1))[0].prompt_logprobs
    found = run(open_llm(), [prompt], params(3))[0].prompt_logprobs
    assert isinstance(found, Logprobs) and len(found) == 20 and found[0] is None
    for token, entry, all_ids in zip(prompt[1:], found[1:], everything[1:], strict=True):
        assert next(iter(entry)) == token and len(entry) in (3, 4) and len(all_ids) == 259
        ordered = sorted(all_ids.values(), key=lambda one: -one.logprob)
        assert sum(torch.tensor([one.logprob for one in ordered]).exp()) == pytest.approx(1.0, abs=1e-5)
        assert {one.rank for one in entry.values()} >= {1, 2, 3}
        assert entry[token].logprob == pytest.approx(ordered[entry[token].rank - 1].logprob, abs=1e-5)
        assert all(one.decoded_token for one in entry.values())
    none = run(open_llm(), [prompt], params(0))[0].prompt_logprobs
    assert [list(entry) for entry in none[1:]] == [[token] for token in prompt[1:]]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_a_drawn_token_has_the_number_it_had_when_it_was_drawn(open_llm, mode):
    """Those of prompts are of the logits as they came, as are raw ones of greedy requests without rules."""
    llm = open_llm(logprobs_mode=mode)
    for prompt in draw_prompts(1, 5, 17, 33):
        (drawn,) = run(llm, [prompt], params(None, 12, logprobs=3))
        (output,) = run(llm, [prompt + drawn.token_ids], params(3, temperature=1.0, top_k=1))
        found = output.prompt_logprobs[len(prompt) :]
        for one, other in zip(found, drawn.outputs[0].logprobs, strict=True):
            assert list(one) == list(other)
            for token, entry in one.items():
                assert entry.rank == other[token].rank
                assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("budget", [1, 7, 8, 40])
def test_chunks_and_company(open_llm, family, budget):
    prompts = draw_prompts(1, 2, 7, 8, 9, 23, 40)
    whole = open_llm(family, enable_prefix_caching=False)
    expected = [run(whole, [prompt], params(2))[0].prompt_logprobs for prompt in prompts]
    each = [params(number) for number in (2, 2, 2, 0, 2, None, 2)]
    found = run(open_llm(family, max_num_batched_tokens=budget), prompts, each)
    for place, (output, entries) in enumerate(zip(found, expected, strict=True)):
        if each[place].prompt_logprobs is None:
            assert output.prompt_logprobs is None
        elif each[place].prompt_logprobs == 2:
            assert_same(output.prompt_logprobs, entries)
        else:
            assert [len(entry or ()) for entry in output.prompt_logprobs] == [0, *[1] * (len(entries) - 1)]


def test_logits_are_made_in_pieces_and_forgotten(open_llm, alone, monkeypatch):
    prompts = draw_prompts(40, 3, 21)
    expected = alone(prompts)
    monkeypatch.setattr(room, "PIECE_ROWS", 8)
    llm = open_llm()
    rows = []
    model = llm._built.model
    plain = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: rows.append(len(hidden)) or plain(hidden))
    found = run(llm, prompts, params(2))
    for output, entries in zip(found, expected, strict=True):
        assert_same(output.prompt_logprobs, entries)
    assert rows == [8] * 7 + [5, 3], "39 + 2 + 20 rows of prompts, then those of three draws"


def test_nothing_is_found_in_the_cache_and_others_find_it_there(open_llm, alone):
    (prompt,) = draw_prompts(40)
    (expected,) = alone([prompt])
    llm = open_llm()
    for _ in range(2):
        (output,) = run(llm, [prompt], params(2))
        assert output.num_cached_tokens == 0
        assert_same(output.prompt_logprobs, expected)
    assert run(llm, [prompt], params(None))[0].num_cached_tokens == 32


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (7, 0), (8, 8), (15, 8), (16, 16), (38, 32), (39, 32)])
def test_what_stands_before_the_start_is_found_in_the_cache(open_llm, alone, start, cached):
    (prompt,) = draw_prompts(40)
    (expected,) = alone([prompt])
    llm = open_llm()
    run(llm, [prompt], params(None))
    (output,) = run(llm, [prompt], params(2, prompt_logprob_start=start))
    assert output.num_cached_tokens == cached
    assert_same(output.prompt_logprobs, expected, start)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_samples_of_a_prompt_compute_it_once_and_tell_it_once(open_llm, alone, caching, stream):
    (prompt,) = draw_prompts(30)
    (expected,) = alone([prompt])
    llm = open_llm(enable_prefix_caching=caching)
    asked = params(2, 6, n=3, temperature=1.0, seed=1)
    outputs = list(llm.stream([prompt], asked)) if stream else run(llm, [prompt], asked)
    assert outputs[-1].finished and {sample.index for output in outputs for sample in output.outputs} == {0, 1, 2}
    for output in outputs:
        assert_same(output.prompt_logprobs, expected)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_lose_nothing_and_double_nothing(open_llm, alone, caching):
    """Cut, and preempted before their prompts are done, and while they decode."""
    prompts = draw_prompts(9, 33, 17, 9, seed=2)
    expected = alone(prompts)
    llm = open_llm(num_gpu_blocks_override=9, max_num_batched_tokens=2, enable_prefix_caching=caching)
    blocks = llm.llm_engine.scheduler.blocks
    free, places = blocks.free, []

    def watch(request):
        if request.finish_reason is None:
            places.append(request.num_computed_tokens - len(request.prompt_token_ids))
        free(request)

    blocks.free = watch
    outputs = run(llm, prompts, [params(2, tokens) for tokens in (50, 30, 30, 50)])
    assert llm.llm_engine.scheduler.num_preemptions > 1 and min(places) < 0 < max(places)
    for output, entries in zip(outputs, expected, strict=True):
        assert_same(output.prompt_logprobs, entries)


def test_preempted_again_and_again(open_llm, alone):
    """At every step somebody is."""
    prompts = draw_prompts(30, 22, 25)
    expected = alone(prompts)
    llm = open_llm(max_num_batched_tokens=5)
    scheduler, decide = llm.llm_engine.scheduler, llm.llm_engine.scheduler.schedule
    draw = random.Random(0)

    def preempt_first():
        if len(scheduler.running) > 1 and draw.random() < 0.5:
            free, grow = scheduler.blocks, scheduler.blocks.grow
            refusals = iter([False])
            free.grow = lambda request, number: next(refusals, True) and grow(request, number)
            try:
                return decide()
            finally:
                free.grow = grow
        return decide()

    scheduler.schedule = preempt_first
    for output, entries in zip(run(llm, prompts, params(2, 20)), expected, strict=True):
        assert_same(output.prompt_logprobs, entries)
    assert scheduler.num_preemptions > 5


class Late:
    """Computes a step when it is submitted, and one more may be submitted before it is told what came of it."""

    lookahead = 1

    def __init__(self, runner, monkeypatch):
        self.runner = runner
        # the CPU's batch takes ids as they are; look up those that stand for rows, as the GPU's does
        plain = batch.Batch
        monkeypatch.setattr(
            batch, "Batch", lambda ids, *rest: plain(take_tokens(ids, runner._drawn.tokens), *rest)
        )  # fmt: skip

    def submit(self, output):
        found = self.runner.submit(output)()
        drawing = [span for span in output.spans if span.samples]
        if drawing:
            tokens = [one.token_id for one, span in zip(found, output.spans, strict=True) if span.samples]
            self.runner._drawn.keep(drawing, torch.tensor(tokens))
        return lambda: found


@pytest.mark.parametrize("options", [{}, dict(num_gpu_blocks_override=9, max_num_batched_tokens=3)], ids=["", "tight"])
def test_a_step_ahead_changes_nothing(open_llm, alone, monkeypatch, options):
    prompts = draw_prompts(9, 33, 20, 1, 2)
    expected = alone(prompts)
    llm = open_llm(**options)
    late = Late(llm.llm_engine._runner, monkeypatch)
    monkeypatch.setattr(llm.llm_engine, "_runner", late)
    outputs = run(llm, prompts, [params(2, tokens) for tokens in (50, 30, 20, 1, 2)])
    for output, entries in zip(outputs, expected, strict=True):
        assert_same(output.prompt_logprobs, entries)
    assert bool(options) == (llm.llm_engine.scheduler.num_preemptions > 0)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_every_output_of_a_stream_has_them(open_llm, alone, kind):
    (prompt,) = draw_prompts(20)
    (expected,) = alone([prompt])

    async def read():
        async with AsyncLLM(open_llm(max_num_batched_tokens=8)) as llm:
            return [output async for output in llm.generate(prompt, params(2, 5, output_kind=kind))]

    for output in asyncio.run(read()):
        assert_same(output.prompt_logprobs, expected)


def test_an_aborted_request_has_what_was_found(open_llm):
    (prompt,) = draw_prompts(30)
    llm = open_llm(max_num_batched_tokens=8)
    engine = llm.llm_engine
    engine.add_request("a", prompt, params(2))
    engine.step()
    engine.step()
    assert len(engine.abort("a").prompt_logprobs) == 17


def test_a_failed_step_leaves_the_next_request_whole(open_llm, alone, monkeypatch):
    (prompt,) = draw_prompts(30)
    (expected,) = alone([prompt])
    llm = open_llm(max_num_batched_tokens=8)
    monkeypatch.setattr(room, "log_probs", lambda *_, **__: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(llm, [prompt], params(2))
    monkeypatch.undo()
    assert_same(run(llm, [prompt], params(2))[0].prompt_logprobs, expected)


@pytest.mark.gpu
def test_a_gpu_is_never_waited_for():
    """And what it says is what the host says of the same rows."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(600, 64, generator=generator), torch.randn(64, 1009, generator=generator)
    requests = [
        Request(
            request_id="", prompt_token_ids=prompt, params=params(number), max_tokens=1, arrival=0,
            prompt_logprobs=Logprobs([Unscored()], [0]),
        )
        for prompt, number in zip(draw_prompts(400, 3, 300), (5, 0, 5), strict=True)
    ]  # fmt: skip
    spans = [Span(request, 0, stop, False) for request, stop in zip(requests, (300, 3, 297), strict=True)]
    told = []
    for device in ("cpu", "cuda"):
        weights, rows = head.to(device), hidden.to(device)
        model = SimpleNamespace(logits=lambda part, weights=weights: part @ weights)
        room.score_prompts(model, rows, spans, "raw_logprobs")  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            deal = room.score_prompts(model, rows, spans, "raw_logprobs")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        told.append([one.prompt for one in deal([None] * 3)])
    for (place, scores, rows), (other_place, others, other_rows) in zip(*told, strict=True):
        assert (place, rows) == (other_place, other_rows)
        for row in rows:
            one, other = scores.entry(row), others.entry(row)
            assert next(iter(one)) == next(iter(other)) and set(one) == set(other)
            assert all(one[token].logprob == pytest.approx(other[token].logprob, abs=1e-2) for token in one)


def test_what_is_refused(open_llm, tiny):
    llm = open_llm()
    for asked, message in (
        (params(21), "prompt_logprobs is 21; it must not exceed max_logprobs=20"),
        (params(-1), "prompt_logprobs is -1; it must not exceed max_logprobs=20"),
        (params(1, prompt_logprob_start=4), "prompt_logprob_start is 4; it must be below the prompt's 4 tokens"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            run(llm, [[1, 2, 3, 4]], asked)
        assert caught.value.parameter == message.split()[0]
    tiny.assert_idle(llm)
    assert run(llm, [[5]], params(1))[0].prompt_logprobs == [None]

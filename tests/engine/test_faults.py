"""When a number, a step or the machine fails: who is told, who is not harmed, and what is left behind."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jaxtyping
import pytest
import torch

from nanovllm import AsyncLLM, RequestOutputKind, SamplingParams
from nanovllm import batch as batches
from nanovllm.errors import ConfigError, EngineError
from nanovllm.interrupts import HeldBack
from nanovllm.ops.take_tokens import take_tokens

BAD = list(range(60, 90))
PROMPTS = [[1, 2, 3], BAD, list(range(5, 40)), [9] * 17]
KINDS = {
    "greedy": dict(temperature=0.0),
    "drawn": dict(temperature=1.0, seed=3),
    "filtered": dict(temperature=1.0, seed=3, top_p=0.8, top_k=20, min_p=0.01),
    "scored": dict(temperature=1.0, seed=3, logprobs=3, presence_penalty=1.0),
}


def ask(kind="greedy", tokens=12, **changes):
    return SamplingParams(**dict(max_tokens=tokens, ignore_eos=True) | KINDS[kind] | changes)


def run(llm, prompts, params, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def facts(output):
    (one,) = output.outputs
    return one.token_ids, one.text, one.finish_reason


def spoil(monkeypatch, llm, after, times=1):
    """Let the logits of the request of BAD hold one NaN when it has this many tokens of output, so many times."""
    runner, steps = llm.llm_engine._runner, []
    runner = getattr(runner, "runner", runner)
    submit, logits = runner.submit, runner.model.logits

    def seen(output):
        steps.append([span for span in output.spans if span.samples])
        return submit(output)

    def spoiled(hidden):
        found = logits(hidden)
        for row, span in enumerate(steps[-1]):
            if span.request.prompt_token_ids == BAD and span.stop == len(BAD) + after and times > spoiled.number:
                found[row, 7] = torch.nan
                spoiled.number += 1
        return found

    spoiled.number = 0
    monkeypatch.setattr(runner, "submit", seen)
    monkeypatch.setattr(runner.model, "logits", spoiled)
    return spoiled


class Late:
    """The real runner, as a GPU looks from outside: a step's tokens are known one step after its submission."""

    lookahead = 1

    def __init__(self, runner):
        self.runner = runner

    def submit(self, output):
        sampled = self.runner.submit(output)()
        if tokens := [each.token_id for each in sampled if each is not None]:
            self.runner._drawn.keep([span for span in output.spans if span.samples], torch.tensor(tokens))
        return lambda: sampled


@pytest.fixture(params=[0, 1], ids=["in turn", "a step ahead"])
def served(request, open_llm, monkeypatch):
    """Open a model whose steps are settled at once, or one step late."""

    def start(**options):
        llm = open_llm(**options)
        if request.param:
            late, plain = Late(llm.llm_engine._runner), batches.Batch
            monkeypatch.setattr(llm.llm_engine, "_runner", late)
            monkeypatch.setattr(
                batches, "Batch", lambda ids, *rest: plain(take_tokens(ids, late.runner._drawn.tokens), *rest)
            )
        return llm

    return start


# Numbers that are none


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1, 5])
def test_nan_in_one_row_ends_that_request_alone(served, open_llm, tiny, monkeypatch, caplog, kind, after):
    expected = [facts(output) for output in run(open_llm(), PROMPTS, ask(kind))]
    llm = served()
    spoil(monkeypatch, llm, after)
    with caplog.at_level(logging.WARNING, "nanovllm"):
        found = [facts(output) for output in run(llm, PROMPTS, ask(kind))]
    assert "hold NaN" in caplog.text
    tokens, text, _ = expected[1]
    assert found[1] == (tokens[:after], llm.get_tokenizer().decode(tokens[:after]), "error")
    assert text.startswith(found[1][1].rstrip("\ufffd"))
    assert found[:1] + found[2:] == expected[:1] + expected[2:]
    tiny.assert_idle(llm)
    assert [facts(output) for output in run(llm, PROMPTS, ask(kind))] == expected, "the engine goes on"


@pytest.mark.parametrize("budget", [8, 512])
def test_what_it_wrote_is_never_found(served, monkeypatch, budget):
    """As vLLM tests it: the first retry finds nothing, the second what the first has put there."""
    llm = served(max_num_batched_tokens=budget)
    fault = spoil(monkeypatch, llm, 10)
    outputs = [run(llm, BAD, ask())[0] for _ in range(3)]
    assert fault.number == 1
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "length"]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 24]


def test_what_others_read_too_stays(served, monkeypatch):
    """A prefix that somebody else has computed and holds is no worse for this."""
    llm = served()
    with llm.cache_prefix(BAD[:16]) as prefix:
        spoil(monkeypatch, llm, 3)
        reasons = [run(llm, BAD, ask())[0].outputs[0].finish_reason for _ in range(2)]
        assert reasons == ["error", "length"] and prefix.num_tokens == 16
        assert run(llm, [*BAD[:16], 5], ask())[0].num_cached_tokens == 16


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_blocks_full_of_nan_harm_nobody_who_gets_them_next(served, open_llm, monkeypatch, family):
    """A masked place adds 0 times what lies there, and 0 * NaN is NaN: so nothing of it may stay in the cache."""
    prompts = [[3, 4], [5] * 9, [7] * 3]
    expected = [facts(output) for output in run(open_llm(family), prompts, ask(tokens=20))]
    llm = served(family=family, num_gpu_blocks_override=9)
    runner = llm.llm_engine._runner
    runner = getattr(runner, "runner", runner)
    submit = runner.submit

    def spoiled(output):
        fetch = submit(output)
        for span in output.spans:
            if span.request.prompt_token_ids == BAD:
                runner.cache.data[:, :, span.request.block_ids] = torch.nan
        return fetch

    monkeypatch.setattr(runner, "submit", spoiled)
    first, *others = run(llm, [BAD, *prompts], ask(tokens=20))
    assert first.outputs[0].finish_reason == "error" and len(first.token_ids) == 1
    assert [facts(output) for output in others] == expected
    assert [facts(output) for output in run(llm, prompts, ask(tokens=20))] == expected
    assert not runner.cache.data.isnan().any()


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("how", ["aborted", "failed"])
def test_nan_of_a_prompt_that_never_drew_harms_nobody_who_gets_its_blocks_next(
    open_llm, monkeypatch, tiny, family, how
):
    """It is aborted, or in a step that fails, before anybody can see what its numbers are."""
    prompts = [[3, 4], [5] * 9, [7] * 3]
    expected = [facts(output) for output in run(open_llm(family), prompts, ask(tokens=20))]
    llm = open_llm(family, num_gpu_blocks_override=9, max_num_batched_tokens=8, enable_prefix_caching=False)
    engine, submit = llm.llm_engine, llm.llm_engine._runner.submit

    def spoiled(output):
        fetch = submit(output)
        for span in output.spans:
            if span.request.prompt_token_ids == BAD:
                engine._runner.cache.data[:, :, span.request.block_ids] = torch.nan
                if how == "failed":
                    raise ValueError("planted")
        return fetch

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "submit", spoiled)
        bad = engine.add_request("bad", BAD, ask())
        with contextlib.suppress(EngineError):
            engine.step()
        assert len(bad.token_ids) == len(BAD) and bad.is_finished == (how == "failed")
        engine.abort("bad")
    tiny.assert_idle(llm)
    assert [facts(output) for output in run(llm, prompts, ask(tokens=20))] == expected


def test_all_samples_of_a_prompt_but_the_one(served, open_llm, monkeypatch):
    params = ask("drawn", n=3)
    (expected,) = run(open_llm(), BAD, params)
    llm = served()
    spoil(monkeypatch, llm, 4)
    (found,) = run(llm, BAD, params)
    assert [one.finish_reason for one in found.outputs].count("error") == 1
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert one.token_ids == other.token_ids[: 4 if one.finish_reason == "error" else None]


def test_a_stream_ends_with_an_error(served, open_llm, monkeypatch):
    expected = facts(run(open_llm(), BAD, ask())[0])
    llm = served()
    spoil(monkeypatch, llm, 3)
    pieces = list(llm.stream(BAD, ask()))
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].outputs[0].finish_reason == "error"
    assert [token for piece in pieces for token in piece.token_ids] == expected[0][:3]


def test_readers_of_an_async_engine_get_theirs(served, open_llm, monkeypatch):
    expected = [facts(output) for output in run(open_llm(), PROMPTS, ask())]
    llm = served()
    spoil(monkeypatch, llm, 3)

    async def read(engine, prompt):
        return [output async for output in engine.generate(prompt, ask(output_kind=RequestOutputKind.FINAL_ONLY))]

    async def main():
        async with AsyncLLM(llm) as engine:
            found = await asyncio.gather(*(read(engine, prompt) for prompt in PROMPTS))
            assert facts(found[1][-1])[::2] == (expected[1][0][:3], "error")
            for place in (0, 2, 3):
                assert facts(found[place][-1]) == expected[place]

    asyncio.run(main())


def test_a_model_that_is_broken_ends_every_request_and_not_the_engine(served, tiny, monkeypatch):
    llm = served()
    runner = llm.llm_engine._runner
    model = getattr(runner, "runner", runner).model
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden) * torch.nan)
    assert [facts(output) for output in run(llm, PROMPTS, ask("scored"))] == [([], "", "error")] * len(PROMPTS)
    monkeypatch.undo()
    tiny.assert_idle(llm)


# Ctrl-C


BOOKS = {
    f"{os.sep}nanovllm{os.sep}{name}.py"
    for name in ("llm", "engine", "scheduler", "block_manager", "request", "interrupts")
}
"""Files that keep books; a line of them is a moment."""


class CtrlC:
    """Presses Ctrl-C before the line of number ``at``, of those that the work runs in the files above."""

    def __init__(self, at=-1):
        self.at = at
        self.lines = 0

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def call(self, frame, event, arg):
        return self.line if frame.f_code.co_filename[-len(max(BOOKS, key=len)) :].endswith(tuple(BOOKS)) else None

    def line(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                signal.raise_signal(signal.SIGINT)
        return self.line


def test_ctrl_c_at_any_moment(open_llm, tiny, monkeypatch):
    """In a call with another one's stream under way: the call ends, the stream and the engine go on."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its lines are traced too, and only take time
    llm = open_llm(num_gpu_blocks_override=9, max_num_batched_tokens=16)
    prompts, params = [[1, 2, 3], [4] * 20], ask("drawn", n=2, tokens=5)
    streamed = facts(run(llm, [7, 8, 9], ask(tokens=16))[0])[0]
    expected = [facts(output) for output in run(llm, PROMPTS[:1], ask())]

    def press(at):
        stream = llm.stream([7, 8, 9], ask(tokens=16))
        pieces = [next(stream)]
        with CtrlC(at) as pressed:
            run(llm, prompts, params)
        assert [token for piece in [*pieces, *stream] for token in piece.token_ids] == streamed
        return pressed.lines

    lines = min(press(-1), press(-1), press(-1)) * 4 // 5  # what the cache finds saves some
    assert lines > 1000
    for at in random.Random(0).sample(range(1, lines + 1), 40):
        stream = llm.stream([7, 8, 9], ask(tokens=16))
        pieces = [next(stream)]
        with pytest.raises(KeyboardInterrupt), CtrlC(at):
            run(llm, prompts, params)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        pieces += stream
        assert [token for piece in pieces for token in piece.token_ids] == streamed, at
        tiny.assert_idle(llm)
    for at in random.Random(1).sample(range(1, 400), 20):
        with contextlib.suppress(KeyboardInterrupt), CtrlC(at):
            list(llm.stream(prompts, params))
        tiny.assert_idle(llm)
    assert [facts(output) for output in run(llm, PROMPTS[:1], ask())] == expected


def test_a_second_ctrl_c_does_not_wait():
    seen = []
    with pytest.raises(KeyboardInterrupt), HeldBack():
        signal.raise_signal(signal.SIGINT)
        seen.append(1)
        signal.raise_signal(signal.SIGINT)
        seen.append(2)
    assert seen == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_handles_ctrl_c_keeps_its_own_way():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("mine"))
    try:
        with HeldBack() as ctrl_c:
            signal.raise_signal(signal.SIGINT)
            ctrl_c.check()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(HeldBack().__enter__).result().__exit__()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["mine"]


SERVE = """
import sys, threading
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", use_tqdm_on_load=False, num_gpu_blocks_override=64)
print("ready", flush=True)
while True:
    llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
"""


def test_sigterm_ends_a_process_at_once_and_leaves_nothing(folders, tmp_path):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folders["llama"])], env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    started = time.monotonic()
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert time.monotonic() - started < 5
    assert (process.returncode, errors, list(scratch.iterdir())) == (-signal.SIGTERM, "", [])


# Memory


def test_no_memory_for_the_cache_names_what_to_turn(open_llm):
    """Of the size that was asked for, or that was found while nobody else had taken it yet."""
    with pytest.raises(ConfigError, match="num_gpu_blocks_override.*max_model_len") as caught:
        open_llm(num_gpu_blocks_override=2**45)
    assert caught.value.parameter == "num_gpu_blocks_override"
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        open_llm(num_gpu_blocks_override=None, kv_cache_memory_bytes=16)


# A step that fails


def test_a_failed_step_reaches_each_reader_and_the_engine_goes_on(served, tiny, monkeypatch):
    """Whoever was in it: a call, a stream, a step ahead or in turn. The same error type for all."""
    llm = served()
    expected = [facts(output) for output in run(llm, PROMPTS, ask())]
    runner = llm.llm_engine._runner
    model = getattr(runner, "runner", runner).model
    logits, calls = model.logits, []

    def failing(hidden):
        calls.append(len(hidden))
        if len(calls) == 4:
            raise RuntimeError("the device is gone")
        return logits(hidden)

    monkeypatch.setattr(model, "logits", failing)
    with pytest.raises(EngineError, match="the device is gone") as caught:
        run(llm, PROMPTS, ask())
    assert [output.outputs[0].finish_reason for output in caught.value.outputs] == ["error"] * len(PROMPTS)
    tiny.assert_idle(llm)
    calls.clear()
    with pytest.raises(EngineError, match="the device is gone"):
        list(llm.stream(PROMPTS, ask()))
    tiny.assert_idle(llm)
    assert [facts(output) for output in run(llm, PROMPTS, ask())] == expected

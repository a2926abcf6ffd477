"""Many readers at once: what each reads, how requests end when readers leave, and how everything ends."""

import asyncio
import gc
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from nanovllm import AsyncLLM, RequestOutputKind, SamplingParams
from nanovllm.async_llm import Inbox
from nanovllm.errors import EngineError, RequestError, UnknownOptionError
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput

PROMPTS = [[72, 101, 108], [5], [9] * 17, [1, 2, 3, 4, 5, 6, 7, 8]]
KINDS = list(RequestOutputKind)


def params_of(kind=RequestOutputKind.CUMULATIVE, **options):
    return SamplingParams(**dict(dict(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=kind), **options))


LONG = params_of(max_tokens=200)


@pytest.fixture
def serving(open_llm):
    """Open the tiny model for asyncio; afterwards its thread must be gone and nothing be lost."""
    opened = []

    def start(family="llama", **options):
        llm = open_llm(family, **options)
        llm.seen = llm.llm_engine.scheduler
        opened.append(AsyncLLM(llm))
        return opened[-1]

    yield start
    for llm in opened:
        llm.close()
        assert not llm._thread.is_alive() and not llm._inboxes and not llm._keys
    assert not [thread for thread in threading.enumerate() if thread.name == "nanovllm engine"]


async def read(stream):
    return [output async for output in stream]


async def idle(llm):
    """Wait until the engine holds nothing."""
    scheduler = llm._llm.seen
    for _ in range(1000):
        if not (scheduler.blocks.num_held or scheduler.running or scheduler.waiting or llm._inboxes or llm._keys):
            return
        await asyncio.sleep(0.002)
    raise AssertionError("blocks are still held")


def whole(open_llm, prompts, params):
    return open_llm().generate(prompts, params, use_tqdm=False)


def check(outputs, expected, kind, name):
    assert {output.request_id for output in outputs} == {name}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is RequestOutputKind.DELTA:
        assert "".join(output.text for output in outputs) == expected.text
        assert [token for output in outputs for token in output.token_ids] == expected.token_ids
        entries = [entry for output in outputs for entry in output.outputs[0].logprobs]
        assert len(entries) == len(expected.token_ids)
        return
    assert len(outputs) == 1 or kind is RequestOutputKind.CUMULATIVE
    assert (outputs[-1].text, outputs[-1].token_ids) == (expected.text, expected.token_ids)
    assert len(outputs[-1].outputs[0].logprobs) == len(expected.token_ids)
    for before, after in pairwise(outputs):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert after.text.startswith(before.text)


def test_many_at_once_each_in_its_kind(serving, open_llm):
    llm = serving()
    expected = whole(open_llm, PROMPTS, params_of(logprobs=1))

    async def main():
        async with llm:
            streams = {
                f"{kind.name} {place}": llm.generate(prompt, params_of(kind, logprobs=1), f"{kind.name} {place}")
                for place, prompt in enumerate(PROMPTS)
                for kind in KINDS
            }
            found = await asyncio.gather(*map(read, streams.values()))
            await idle(llm)
        for name, outputs in zip(streams, found, strict=True):
            check(outputs, expected[int(name[-1])], RequestOutputKind[name.split()[0]], name)

    asyncio.run(main())


def test_samples_come_by_index(serving, open_llm):
    llm = serving()
    params = params_of(n=3, temperature=1.0, seed=4)
    (expected,) = whole(open_llm, [PROMPTS[2]], params)

    async def main():
        for kind in KINDS:
            texts = {}
            async for output in llm.generate(PROMPTS[2], params_of(kind, n=3, temperature=1.0, seed=4)):
                for completion in output.outputs:
                    before = texts.get(completion.index, "") if kind is RequestOutputKind.DELTA else ""
                    texts[completion.index] = before + completion.text
            assert texts == {completion.index: completion.text for completion in expected.outputs}

    asyncio.run(main())


def test_chat(serving, open_llm):
    llm = serving()
    talk = [{"role": "user", "content": [{"type": "text", "text": "hé"}]}]
    (expected,) = open_llm().chat(talk, params_of(), use_tqdm=False)

    async def main():
        outputs = await read(llm.chat(talk, params_of(), priority=0))
        assert (outputs[-1].text, outputs[-1].prompt) == (expected.text, expected.prompt)
        with pytest.raises(RequestError, match="chat has no option 'temperature'"):
            llm.chat(talk, temperature=1)

    asyncio.run(main())


def test_what_is_wrong_is_said_at_the_call(serving):
    llm = serving()
    wrong = [
        dict(prompt=[]), dict(prompt=[999]), dict(prompt=[1] * 400), dict(prompt=None), dict(prompt=[1], priority="x"),
        dict(prompt=[1], priority=1), dict(prompt=[1], sampling_params="greedy"), dict(prompt=[1], request_id=5),
        dict(prompt=[1], sampling_params=SamplingParams(logprobs=21)),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(RequestError):
            llm.generate(**arguments)

    async def main():
        first, second = (llm.generate([1], LONG, "name") for _ in range(2))
        await anext(first)
        with pytest.raises(RequestError, match="request_id is 'name'"):
            llm.generate([1], LONG, "name")
        with pytest.raises(RequestError, match="request_id is 'name'"):
            await anext(second)
        await first.aclose()
        assert (await read(llm.generate([1], params_of(), "name")))[-1].finished
        await idle(llm)

    asyncio.run(main())
    with pytest.raises(UnknownOptionError):
        AsyncLLM("nowhere", modle=1)


def test_a_grammar_that_is_refused_harms_nobody_else(serving, open_llm):
    """It is compiled on the engine's thread, when the request is queued there."""
    pytest.importorskip("llguidance")
    llm = serving()
    expected = whole(open_llm, PROMPTS[0], LONG)[0].token_ids

    async def main():
        good = llm.generate(PROMPTS[0], LONG)
        await anext(good)
        bad = params_of(structured_outputs=dict(regex="(ab"))
        for kind in KINDS:
            with pytest.raises(RequestError, match="regex is '.ab'; it is refused") as caught:
                await read(llm.generate(PROMPTS[1], replace(bad, output_kind=kind), "bad"))
            assert caught.value.parameter == "regex"
        with pytest.raises(UnknownOptionError, match="regexp"):
            await read(llm.generate(PROMPTS[1], params_of(structured_outputs=dict(regexp="ab"))))
        assert (await read(good))[-1].token_ids == expected
        await idle(llm)

    asyncio.run(main())


def test_a_drawn_name_is_an_unused_one(serving):
    llm = serving()

    async def main():
        streams = [llm.generate([1], params_of(), name) for name in ("0", "1", "2", None, None, "9")]
        names = [outputs[0].request_id for outputs in await asyncio.gather(*map(read, streams))]
        assert len(set(names)) == 6 and {"0", "1", "2", "9"} < set(names)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["abort", "cancel", "break", "aclose", "error", "timeout"])
@pytest.mark.parametrize("kind", KINDS)
def test_when_the_reader_leaves_the_request_ends(serving, open_llm, way, kind):
    llm = serving()
    expected = whole(open_llm, PROMPTS[:1], params_of(max_tokens=60))[0].token_ids

    async def main():
        other = asyncio.create_task(read(llm.generate(PROMPTS[0], params_of(max_tokens=60))))
        stream = llm.generate([9] * 17, params_of(kind, max_tokens=230), "mine")

        async def use(stream):
            async for _ in stream:
                if way == "break":
                    break
                if way == "error":
                    raise LookupError

        task = asyncio.create_task(use(stream) if way not in {"abort", "aclose"} else read(stream))
        await asyncio.sleep(0.01)
        if way == "abort":
            llm.abort("mine")
            llm.abort("nobody")
            outputs = await task
            assert outputs[-1].outputs[0].finish_reason == "abort" and outputs[-1].finished
        elif way == "cancel" or kind is RequestOutputKind.FINAL_ONLY:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        elif way == "timeout":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(task, 0.01)
        elif way == "break":
            await task
        elif way == "error":
            await asyncio.wait([task])
            assert isinstance(task.exception(), LookupError)
        else:
            task.cancel()
            await asyncio.wait([task])
            await stream.aclose()
        del stream, task  # the error's traceback holds the iterator
        gc.collect()
        assert (await other)[-1].token_ids == expected
        await idle(llm)

    asyncio.run(main())


def test_an_iterator_never_begun_leaves_nothing(serving):
    llm = serving()

    async def main():
        stream = llm.generate([1], LONG, "x")
        await stream.aclose()
        llm.generate([1], LONG, "x")
        await asyncio.sleep(0)
        await idle(llm)
        assert llm._llm.llm_engine.scheduler.num_preemptions == 0

    asyncio.run(main())


def fail_at(llm, step, error):
    """Let the model runner raise at its ``step``-th step from now, once."""
    runner = llm._llm.llm_engine._runner
    submit, calls = runner.submit, []

    def failing(output):
        calls.append(output)
        if len(calls) == step:
            raise error
        return submit(output)

    runner.submit = failing


@pytest.mark.parametrize("step", [1, 3])
def test_a_failed_step_reaches_all_who_wait_for_it_and_the_engine_goes_on(serving, open_llm, step):
    llm = serving()
    expected = whole(open_llm, PROMPTS[:1], params_of())[0].token_ids
    fail_at(llm, step, RuntimeError("the machine is on fire"))

    async def main():
        streams = [llm.generate(prompt, LONG) for prompt in PROMPTS]
        found = await asyncio.gather(*map(read, streams), return_exceptions=True)
        failed = [each for each in found if isinstance(each, BaseException)]
        assert failed and all(isinstance(each, EngineError) and "on fire" in str(each) for each in failed)
        assert len(set(map(id, failed))) == len(failed), "each reader has an error of its own"
        await idle(llm)
        assert (await read(llm.generate(PROMPTS[0], params_of())))[-1].token_ids == expected

    asyncio.run(main())


class PanicError(BaseException):
    """As pyo3 raises it where a library of Rust panics."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, PanicError])
def test_an_engine_that_is_lost_says_so_to_everybody(serving, monkeypatch, kind):
    llm = serving()

    def lost():
        raise kind

    async def main():
        waiting = [asyncio.create_task(read(llm.generate(prompt, LONG))) for prompt in PROMPTS]
        await asyncio.sleep(0.01)
        monkeypatch.setattr(llm._llm.llm_engine.scheduler, "schedule", lost)
        for found in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60):
            assert isinstance(found, EngineError) and f"the engine is lost: {kind.__name__}" in str(found)
        with pytest.raises(EngineError, match="lost"):
            llm.generate([1])

    asyncio.run(main())
    llm.close()


def test_close_ends_everything_and_may_be_called_again(serving):
    llm = serving()

    async def main():
        async with llm:
            waiting = [asyncio.create_task(read(llm.generate(prompt, LONG))) for prompt in PROMPTS]
            late = llm.generate([1], LONG)
            await asyncio.sleep(0.01)
        assert not llm._thread.is_alive()
        for found in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(found, EngineError) and "closed" in str(found)
        with pytest.raises(EngineError, match="closed"):
            await anext(late)
        with pytest.raises(EngineError, match="closed"):
            llm.generate([1])
        llm.abort("x")
        llm.close()

    asyncio.run(main())
    assert "closed" in repr(llm._llm)


def test_an_event_loop_that_is_closed_takes_its_requests_with_it(serving):
    """Closed the hard way, with a request under way and its task never finished."""
    llm = serving()
    loop = asyncio.new_event_loop()
    stream = llm.generate([1], LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    deadline = time.monotonic() + 5
    scheduler = llm._llm.seen
    while (scheduler.running or scheduler.blocks.num_held or llm._inboxes) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not scheduler.running and not scheduler.blocks.num_held and not llm._inboxes
    with pytest.raises(StopIteration):
        stream.aclose().send(None)
    assert asyncio.run(read(llm.generate([1], params_of())))[-1].finished


def test_several_event_loops_at_once(serving, open_llm):
    llm = serving()
    expected = [output.token_ids for output in whole(open_llm, PROMPTS, params_of())]
    found = {}

    def serve(place):
        found[place] = asyncio.run(read(llm.generate(PROMPTS[place], params_of())))[-1].token_ids

    threads = [threading.Thread(target=serve, args=(place,)) for place in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_slow_reader_gets_fewer_and_larger_outputs(serving, open_llm, kind):
    llm = serving()
    (expected,) = whole(open_llm, PROMPTS[:1], params_of(max_tokens=100, logprobs=0))

    async def main():
        outputs = []
        async for output in llm.generate(PROMPTS[0], params_of(kind, max_tokens=100, logprobs=0), "x"):
            outputs.append(output)
            time.sleep(0.05)  # the whole event loop is busy elsewhere
        assert len(outputs) < 50
        check(outputs, expected, kind, "x")

    asyncio.run(main())


def test_an_inbox_wakes_its_reader_once_until_it_comes():
    """However much arrives: so the event loop has one callback to keep, and the inbox one output."""
    inbox = Inbox("x", None, cumulative=False)

    def piece(number):
        sample = CompletionOutput(0, f"{number} ", [number], -0.5, [{number: Logprob(-0.5, 1)}])
        return RequestOutput("x", None, [1], [sample], finished=False)

    for start in (0, 1000):
        woken = [inbox.put(piece(number)) for number in range(start, start + 1000)]
        assert woken == [True] + [False] * 999
        (output,) = inbox.take().outputs
        numbers = list(range(start, start + 1000))
        assert output.token_ids == numbers == [int(word) for word in output.text.split()]
        assert [next(iter(entry)) for entry in output.logprobs] == numbers
    assert inbox.put("broken")
    with pytest.raises(EngineError, match="broken"):
        inbox.take()

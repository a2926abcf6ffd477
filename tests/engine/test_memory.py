"""Memory does not grow with time: thousands of requests with new prompts leave nothing behind but what is cached."""

import asyncio
import gc
import random
import weakref
from collections import Counter
from pathlib import Path

import jaxtyping
import pytest

from nanovllm import AsyncLLM, RequestOutputKind, SamplingParams
from nanovllm.async_llm import Inbox
from nanovllm.interrupts import old_objects_kept
from nanovllm.outputs import CompletionOutput, Logprobs, RequestOutput
from nanovllm.request import Request
from nanovllm.sampler import StepScores
from nanovllm.structured.matcher import GrammarMatcher
from nanovllm.tokenizer import Detokenizer

OURS = (Request, RequestOutput, CompletionOutput, Logprobs, StepScores, SamplingParams, Detokenizer, Inbox,
        GrammarMatcher)  # fmt: skip
PARAMS = [
    SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2, seed=1),
    SamplingParams(max_tokens=3, temperature=0.0, stop="xyz", presence_penalty=1.0, bad_words=["ab"]),
    SamplingParams(max_tokens=2, n=2, top_p=0.9, logprobs=0, output_kind=RequestOutputKind.DELTA),
    SamplingParams(max_tokens=4, structured_outputs={"regex": "[ab]{2,9}"}, output_kind=RequestOutputKind.FINAL_ONLY),
]
MEGABYTE = 2**20


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def alive():
    """Our objects that somebody still holds, and how many objects there are in all."""
    gc.collect()
    everything = gc.get_objects()
    return Counter(type(each).__name__ for each in everything if type(each) in OURS), len(everything)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def prompts(number, seed):
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(dice.randint(1, 24))] for _ in range(number)]


def by_call(llm, number, seed):
    for start in range(0, number, 50):
        llm.generate(prompts(50, seed + start), PARAMS[:3] * 16 + PARAMS[:2], use_tqdm=False)


def by_stream(llm, number, seed):
    for start in range(0, number, 50):
        stream = llm.stream(prompts(50, seed + start), PARAMS * 12 + PARAMS[:2])
        for place, _ in enumerate(stream):
            if start % 100 and place > 60:  # every other reader leaves early
                break
        stream.close()


def by_readers(llm, number, seed):
    async def read(engine, prompt, params, leaves):
        async for _ in engine.generate(prompt, params):
            if leaves:
                break

    async def main():
        engine = AsyncLLM(llm)
        for start in range(0, number, 50):
            await asyncio.gather(
                *(
                    read(engine, prompt, PARAMS[place % 4], place % 7 == 0)
                    for place, prompt in enumerate(prompts(50, seed + start))
                )
            )
        assert not engine._inboxes and not engine._keys
        engine._commands.put(None)  # close() would take the model with it, and it is needed again
        await asyncio.to_thread(engine._thread.join)

    llm.close, close = lambda: None, llm.close
    asyncio.run(main())
    llm.close = close


@pytest.mark.parametrize(("serve", "number"), [(by_call, 1000), (by_stream, 600), (by_readers, 600)])
def test_nothing_is_held_when_results_are_delivered(open_llm, serve, number):
    llm = open_llm(num_gpu_blocks_override=40)
    serve(llm, number // 2, seed=10**6)
    before, objects = alive()
    serve(llm, number, seed=2 * 10**6)
    after, more = alive()
    assert after == before and not after["Request"] and not after["RequestOutput"] and not after["StepScores"]
    assert more - objects < number // 10, "one object for each request would show ten times over"
    blocks = llm.llm_engine.scheduler.blocks
    assert blocks.num_evictions > number, "the prompts were meant to be new"
    assert len(blocks._index) <= 40


def test_resident_memory_is_flat(open_llm):
    """Steps of one size: oneDNN keeps code for each size that it meets, up to 1,024, which is not ours to measure."""
    llm = open_llm(num_gpu_blocks_override=40, max_num_seqs=10)
    dice = random.Random(0)

    def serve(number):
        for _ in range(number // 50):
            some = [[dice.randrange(256) for _ in range(12)] for _ in range(50)]
            llm.generate(some, PARAMS[0], use_tqdm=False)
        gc.collect()
        return resident_bytes()

    before = serve(500)
    assert serve(10_000) - before < 2 * MEGABYTE  # 200 bytes a request


def test_a_result_keeps_its_own_numbers_and_nothing_of_the_engine(open_llm):
    llm = open_llm()
    outputs = llm.generate(prompts(10, 1), PARAMS[0], use_tqdm=False)
    kinds, _ = alive()
    assert kinds["Request"] == kinds["Detokenizer"] == 0
    assert (kinds["RequestOutput"], kinds["Logprobs"]) == (10, 10)
    steps = kinds["StepScores"]
    assert 0 < steps <= 20, "one for each step, and not for each token"
    del outputs
    kinds, _ = alive()
    assert not kinds["StepScores"] and not kinds["Logprobs"]


class Frozen:
    """Notes at each step how many objects the collector passes over."""

    def __init__(self):
        self.counts = []

    def on_step(self, output, times):
        self.counts.append(gc.get_freeze_count())

    def on_arrival(self, request): ...
    def on_decision(self, output): ...
    def on_end(self, request): ...
    def close(self): ...


def test_what_was_there_before_a_call_is_not_looked_at_within_it_and_is_after_it(open_llm):
    llm, frozen = open_llm(), Frozen()
    llm.llm_engine.observers.append(frozen)
    llm.generate(prompts(3, 1), PARAMS[0], use_tqdm=False)
    assert frozen.counts and min(frozen.counts) > 10_000
    assert gc.get_freeze_count() == 0
    with pytest.raises(ValueError):
        llm.generate([[]], PARAMS[0], use_tqdm=False)
    assert gc.get_freeze_count() == 0
    frozen.counts.clear()
    stream = llm.stream(prompts(3, 1), PARAMS[0])
    next(stream)
    stream.close()
    assert frozen.counts and min(frozen.counts) > 10_000 and gc.get_freeze_count() == 0
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        llm.generate(prompts(3, 1), PARAMS[0], use_tqdm=False)
        assert gc.get_freeze_count() > before - 1000, "they are the program's: they stay frozen"
    finally:
        gc.unfreeze()


def test_what_was_there_before_an_async_llm_is_not_looked_at_until_it_is_closed(open_llm):
    llm, frozen = open_llm(), Frozen()
    llm.llm_engine.observers.append(frozen)
    garbage = Frozen()
    garbage.itself, watched = garbage, weakref.ref(garbage)
    del garbage
    serving = AsyncLLM(llm)

    async def read():
        return [output async for output in serving.generate([1, 2, 3], PARAMS[0])]

    asyncio.run(read())
    serving.close()
    assert frozen.counts and min(frozen.counts) > 10_000 and gc.get_freeze_count() == 0
    assert watched() is None, "garbage would wait as long"


def test_what_an_interpreter_freezes_at_its_start_is_not_the_programs(monkeypatch):
    """Python 3.12 has 375 frozen objects before the first line."""
    calls = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    for count, expected in ((0, ["freeze", "unfreeze"]), (375, ["freeze", "unfreeze"]), (100_000, [])):
        monkeypatch.setattr(gc, "get_freeze_count", lambda count=count: count)
        calls.clear()
        with old_objects_kept():
            assert calls == expected[:1]
        assert calls == expected

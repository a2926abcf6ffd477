"""From ``LLM(..., trace=...)`` to files and back: what is recorded, when it is written, and what is refused."""

import asyncio
import errno
import gc
import json
import logging
import tracemalloc
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from nanovllm import LLM, AsyncLLM, ConfigError, EngineError, RequestOutputKind, SamplingParams
from nanovllm.admission import Limits
from nanovllm.block_manager import BlockManager
from nanovllm.engine import LLMEngine
from nanovllm.observer import StepTimes
from nanovllm.request import Sampled
from nanovllm.scheduler import Scheduler, SchedulerOutput, Span
from nanovllm.tokenizer import Tokenizer, TokenizerParts
from nanovllm.trace import file, recording
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.recording import TraceError
from nanovllm.trace.replay import Replay
from nanovllm.trace.texts import text_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def drawn(found, place):
    """The tokens that a recording says a request has drawn, in order."""
    spans = [span for step in found["steps"] for span in step["spans"] if span[0] == place and span[3] >= 0]
    return [token for _, _, _, token in sorted(spans, key=lambda span: span[2])]


# --- what is recorded ---


def test_a_recording_holds_what_was_computed(open_llm, tmp_path):
    target = tmp_path / "run.html"
    prompts = ["The same beginning, and one end", "The same beginning, and another end", "short"]
    params = [SamplingParams(seed=7, max_tokens=20, logprobs=2, stop=["zzzz"]), GREEDY, GREEDY]
    with open_llm(trace=str(target), max_num_batched_tokens=16, num_gpu_blocks_override=9) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert not target.exists(), "it is written when the engine is closed"
        preemptions, tokenizer = llm.llm_engine.scheduler.num_preemptions, llm.get_tokenizer()
    found = recording.load(target)
    assert set(found) == {
        "format", "version", "engine", "texts", "requests", "steps", "tail", "dropped_steps"
    }  # fmt: skip
    facts = found["engine"]
    assert facts["model"] == Path(llm.config.model).name, "a path may tell more than one wants to"
    assert {name: facts[name] for name in ("block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs")} == {
        "block_size": 8, "num_blocks": 9, "max_num_batched_tokens": 16, "max_num_seqs": 256,
    }  # fmt: skip
    assert (facts["device"], facts["dtype"], facts["policy"], facts["enable_prefix_caching"]) == (
        "cpu", "float32", "fcfs", True,
    )  # fmt: skip
    assert facts["device_name"] and facts["nanovllm"] and facts["started"].endswith("Z")
    for place, (output, row) in enumerate(zip(outputs, found["requests"], strict=True)):
        assert (row["id"], row["sample"], row["prompt"]) == (output.request_id, 0, output.prompt_token_ids)
        assert (row["text"], row["finish"], row["stop"]) == (output.text, output.outputs[0].finish_reason, None)
        assert row["cached"] == output.num_cached_tokens
        assert drawn(found, place) == output.token_ids
        told = "".join(found["texts"][str(token)] for token in [*row["prompt"], *output.token_ids])
        whole = tokenizer.decode([*row["prompt"], *output.token_ids], skip_special_tokens=False)
        assert told.encode(errors="surrogateescape").decode(errors="replace") == whole
    assert found["requests"][0]["params"] == {"seed": 7, "max_tokens": 20, "logprobs": 2, "stop": ["zzzz"]}
    assert found["requests"][1]["params"] == {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    assert sum(len(step["preempted"]) for step in found["steps"]) == preemptions > 0
    assert any(step["wait"] for step in found["steps"]) and found["dropped_steps"] == 0
    assert all(step["t"] == sorted(step["t"]) and "failed" not in step for step in found["steps"])


def test_candidates_are_those_that_were_asked_for(open_llm, tmp_path):
    target = tmp_path / "run.recording.json"
    with open_llm(trace=str(target)) as llm:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=3, ignore_eos=True)
        asked, plain = llm.generate(["abc", "xyz"], [params, GREEDY], use_tqdm=False)
    found = recording.load(target)
    tops = [step.get("top", {}) for step in found["steps"]]
    assert [set(top) for top in tops] == [{"0"}] * 6 + [set()] * 6
    told = [top["0"] for top in tops if top]
    expected = asked.outputs[0].logprobs
    for candidates, entries in zip(told, expected, strict=True):
        assert candidates == [[token, round(each.logprob, 4)] for token, each in entries.items()]
    assert plain.outputs[0].logprobs is None


def test_raw_logits_are_no_candidates(open_llm, tmp_path):
    target = tmp_path / "run.recording.json"
    with open_llm(trace=str(target), logprobs_mode="raw_logits") as llm:
        llm.generate("abc", SamplingParams(max_tokens=3, logprobs=3), use_tqdm=False)
    assert not any("top" in step for step in recording.load(target)["steps"])


def test_samples_streams_and_chats(open_llm, tmp_path):
    target = tmp_path / "run.recording.json"
    with open_llm(trace=str(target)) as llm:
        (output,) = llm.generate("A prompt of some blocks", SamplingParams(n=3, seed=3, max_tokens=8), use_tqdm=False)
        pieces = list(llm.stream(["streamed"], GREEDY))
        (answer,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)
        stream = llm.stream("left early", SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        stream.close()
    found = recording.load(target)
    assert [(row["id"], row["sample"]) for row in found["requests"][:3]] == [(output.request_id, n) for n in range(3)]
    assert [drawn(found, place) for place in range(3)] == [sample.token_ids for sample in output.outputs]
    assert found["steps"][0]["wait"] == "prefix", "the others wait until they can find the prompt"
    assert drawn(found, 3) == [token for piece in pieces for token in piece.token_ids]
    assert found["requests"][4]["text"] == answer.text
    assert found["requests"][5]["finish"] == "abort"


def test_many_callers(folder, tmp_path):
    target = tmp_path / "run.recording.json"

    async def ask(llm, number):
        params = SamplingParams(max_tokens=8, seed=number, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in llm.generate(f"caller {number}", params):
            last = output
        return last.text

    async def main():
        options = dict(load_format="dummy", dtype="float32", num_gpu_blocks_override=32, trace=str(target))
        async with AsyncLLM(folder, **options) as llm:
            return await asyncio.gather(*(ask(llm, number) for number in range(5)))

    texts = asyncio.run(main())
    assert sorted(row["text"] for row in recording.load(target)["requests"]) == sorted(texts)


def test_two_ranks_write_one_recording(open_llm, tmp_path):
    target = tmp_path / "run.recording.json"
    with open_llm(trace=str(target), tensor_parallel_size=2) as llm:
        (output,) = llm.generate("two ranks", GREEDY, use_tqdm=False)
    assert drawn(recording.load(target), 0) == output.token_ids
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_pin_is_nobody_s(open_llm, tmp_path):
    target = tmp_path / "run.recording.json"
    with open_llm(trace=str(target)) as llm, llm.cache_prefix("sixteen letters, and some more"):
        llm.generate("sixteen letters, and an end", GREEDY, use_tqdm=False)
    found = recording.load(target)
    pins = [owner for step in found["steps"] for code, owner in zip(step["blocks"][::3], step["blocks"][2::3], strict=1)
            if code == recording.HOLD]  # fmt: skip
    assert pins.count(recording.NOBODY) == 3 and pins.count(1) == 2
    assert found["requests"][1]["cached"] == 16


def test_a_failed_step_says_why(open_llm, tmp_path, monkeypatch):
    target = tmp_path / "run.recording.json"
    with open_llm(trace=str(target)) as llm:
        llm.generate("before", GREEDY, use_tqdm=False)
        runner = llm.llm_engine._runner
        with monkeypatch.context() as patch, pytest.raises(EngineError):
            patch.setattr(runner, "submit", lambda output: 1 / 0)
            llm.generate("failing", GREEDY, use_tqdm=False)
        llm.generate("after", GREEDY, use_tqdm=False)
    found = recording.load(target)
    failed = [number for number, step in enumerate(found["steps"]) if "failed" in step]
    assert failed == [12] and found["steps"][12]["failed"] == "ZeroDivisionError: division by zero"
    assert found["requests"][1]["finish"] == "error" and found["requests"][1]["end_step"] == 12
    assert found["steps"][12]["spans"] == [[1, 0, 7, recording.DROPPED]]
    assert len(drawn(found, 2)) == 12


# --- when it is written ---


def test_closing_writes_once(open_llm, tmp_path):
    target = tmp_path / "run.html"
    llm = open_llm(trace=str(target))
    llm.generate("one", GREEDY, use_tqdm=False)
    llm.close()
    assert len(recording.load(target)["steps"]) == 12
    assert {path.name for path in tmp_path.iterdir()} == {"run.html", "run.json"}
    target.unlink()
    llm.close()
    del llm
    gc.collect()
    assert not target.exists()


def test_the_last_reference_writes_too(folder, tmp_path):
    target = tmp_path / "run.recording.json"
    llm = LLM(folder, load_format="dummy", dtype="float32", num_gpu_blocks_override=32, trace=str(target))
    llm.generate("one", GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    assert len(recording.load(target)["steps"]) == 12


def test_nothing_is_empty_and_can_be_read(open_llm, tmp_path):
    target = tmp_path / "run.html"
    open_llm(trace=str(target)).close()
    found = recording.load(target)
    assert (found["requests"], found["steps"], found["tail"]) == ([], [], [])


def test_without_a_tokenizer_there_are_no_texts(open_llm, tmp_path):
    target = tmp_path / "run.recording.json"
    with open_llm(trace=str(target), skip_tokenizer_init=True) as llm:
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    found = recording.load(target)
    assert found["texts"] == {} and found["requests"][0]["text"] == "" and len(drawn(found, 0)) == 12


@pytest.mark.parametrize(
    "text", ["日本語 שלום مرحبا", "e\u0301 👩\u200d👩\u200d👧\u200d👦", "\ufffd and \u2581 and \xa0", "\x00\x1b\n\ttab"]
)
def test_the_texts_of_tokens_are_the_text_when_joined(open_llm, tmp_path, text):
    """Also where a token is a part of a character: each byte is one."""
    target = tmp_path / "run.html"
    with open_llm(trace=str(target)) as llm:
        llm.generate(text, GREEDY, use_tqdm=False)
    found = recording.load(target)
    told = "".join(found["texts"][str(token)] for token in found["requests"][0]["prompt"])
    assert told.encode("utf-8", "surrogateescape").decode("utf-8") == text


def test_spaces_that_a_decoder_strips_and_bytes_that_it_names_are_told():
    """As sentencepiece has them: its decoder takes each token for the beginning of a text."""
    words = [
        "<unk>",
        "\u2581Once",
        "\u2581upon",
        "on",
        "\u2581",
        "\u2581\u2581two",
        "<0xE6>",
        "<0x97>",
        "<0xA5>",
        "<0x41>",
    ]
    backend = Backend(models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(TokenizerParts(backend=backend))
    told = [text_of(tokenizer, token) for token in range(1, len(words) + 1)]
    assert told == [" Once", " upon", "on", " ", "  two", "\udce6", "\udc97", "\udca5", "A", ""]


def test_off_is_off(open_llm):
    llm = open_llm(disable_log_stats=True)
    assert llm.llm_engine.observers == [] and llm.llm_engine.scheduler.blocks.journal is None


def test_a_full_disk_costs_the_trace_and_nothing_else(open_llm, tmp_path, monkeypatch, caplog):
    target = tmp_path / "run.html"
    target.write_text("what was there before")

    def full(path, text, **_):
        with path.open("w") as opened:
            opened.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with open_llm(trace=str(target)) as llm:
        (output,) = llm.generate("one", GREEDY, use_tqdm=False)
    assert len(output.token_ids) == 12
    assert "No space left on device" in caplog.text and str(target) in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"] and target.read_text() == "what was there before"


def test_a_lone_surrogate_can_be_written_and_read(tmp_path):
    file.replace(tmp_path / "a.json", recording.dump({"text": "\ud800 日本"}))
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"text": "\ud800 日本"}


# --- what is refused ---


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("run.txt", "must end in .html"), ("run.json", "must end in .html"), (".html", "must end in .html"),
        ("run.html.gz", "must end in .html"), ("", "must be a file, and this is a folder"),
        ("folder.html", "must be a file, and this is a folder"), ("no/such/run.html", "folder that exists"),
        ("taken.html", "another file of that name"), ("occupied.html", "another file of that name"),
    ],
)  # fmt: skip
def test_a_bad_path_is_refused_before_anything_is_loaded(tmp_path, path, rule):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "occupied.json").mkdir()
    (tmp_path / "taken.json").write_text('{"name": "somebody\'s"}')
    given = str(tmp_path / path)
    with pytest.raises(ConfigError, match=rule) as refused:
        LLM("there-is-no-such-model", trace=given)
    assert (refused.value.parameter, refused.value.value) == ("trace", given) and given in str(refused.value)
    assert (tmp_path / "taken.json").read_text() == '{"name": "somebody\'s"}'


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file.os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="may be written to"):
        LLM("there-is-no-such-model", trace=str(tmp_path / "run.html"))


def test_a_trace_is_a_string():
    with pytest.raises(ConfigError, match="trace is 3"):
        LLM("there-is-no-such-model", trace=3)


def test_our_own_files_are_replaced(open_llm, tmp_path):
    for prompt in ("one", "two!"):
        with open_llm(trace=str(tmp_path / "run.html")) as llm:
            llm.generate(prompt, GREEDY, use_tqdm=False)
    assert len(recording.load(tmp_path / "run.html")["requests"][0]["prompt"]) == 4


GOOD = {"format": recording.FORMAT, "version": 1, "engine": {}, "texts": {}, "requests": [], "steps": [], "tail": []}


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (json.dumps(GOOD | {"version": 2}), "version 2, and this nanovllm reads version 1"),
        (json.dumps({name: value for name, value in GOOD.items() if name != "version"}), "version None"),
        (json.dumps(GOOD | {"steps": {}}), "'steps' is {}"),
        ('{"displayTimeUnit":"ms"}', "holds no recording"), ("[]", "holds no recording"), ("", "holds no recording"),
        ("<html>", "holds no recording"), ("[" * 100_000, "holds no recording"), (b"\xff\xfe\x00", "cannot be read"),
        (None, "cannot be read: No such file"),
    ],
)  # fmt: skip
def test_what_is_no_recording_is_refused(tmp_path, content, rule):
    path = tmp_path / "x.html"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError, match=rule) as refused:
        recording.load(path)
    assert str(path) in str(refused.value) and refused.value.parameter == "path"


def test_a_recording_begins_before_requests_come(open_llm):
    engine = open_llm().llm_engine
    engine.add_request("early", [1, 2, 3], GREEDY)
    with pytest.raises(EngineError, match="begins before they come"):
        Recorder(engine)
    engine.abort("early")


def test_a_recorder_that_fails_leaves_no_journal_behind(open_llm, monkeypatch, tmp_path, caplog):
    target = tmp_path / "run.recording.json"
    with open_llm(trace=str(target), disable_log_stats=True) as llm:
        (recorder,) = llm.llm_engine.observers
        monkeypatch.setattr(recorder, "_settle", lambda *_: 1 / 0)
        (output,) = llm.generate("one", GREEDY, use_tqdm=False)
        assert len(output.token_ids) == 12 and llm.llm_engine.observers == []
        assert llm.llm_engine.scheduler.blocks.journal is None and "is dismissed" in caplog.text
    recorder.close()
    found = recorder.recording()
    assert found["steps"] == [] and found["dropped_steps"] == 1, (
        "what could not be written down is missing, and said to"
    )


# --- a step is the one before, one token on: unless it is not ---


def told(engine, *stops):
    """Decisions for the one request of an engine, each from where the one before it stops."""
    ((request,),) = engine._requests.values()
    return [
        SchedulerOutput((Span(request, start, stop, True),)) for start, stop in zip((0, *stops), stops, strict=False)
    ]


@pytest.fixture
def by_hand():
    """An engine with one request of three tokens, which is told of by hand, and has drawn all that may be asked for."""
    scheduler = Scheduler(BlockManager(20, 16), max_num_seqs=1, max_num_batched_tokens=64)
    engine = LLMEngine(scheduler, Counting(), Limits(max_model_len=1000, vocab_size=1000))
    engine.observers.append(Recorder(engine))
    request = engine.add_request(None, [1, 2, 3], GREEDY)
    request.token_ids += range(100, 120)
    return engine, engine.observers[0]


def steps(recorder):
    recorder.close()
    return recorder.recording()["steps"]


TIMES = StepTimes(1, 2, 3, 4, 5, 6)


def test_a_step_that_computes_more_than_one_token_is_recorded_as_it_is(by_hand):
    engine, recorder = by_hand
    for output in told(engine, 3, 4, 5, 8, 9, 10):
        recorder.on_decision(output)
        recorder.on_step(output, TIMES)
    ends = [(0, 3, 100), (3, 4, 101), (4, 5, 102), (5, 8, 105), (8, 9, 106), (9, 10, 107)]
    assert [step["spans"] for step in steps(recorder)] == [[[0, *end]] for end in ends]


def test_a_step_behind_one_that_came_to_nothing_is_recorded_as_it_is(by_hand):
    engine, recorder = by_hand
    first, second, third = told(engine, 3, 4, 5)
    recorder.on_decision(first)
    recorder.on_step(first, TIMES)
    recorder.on_decision(second)
    recorder.on_decision(third)
    recorder.on_step(third, TIMES)
    found = [step["spans"] for step in steps(recorder)]
    assert found == [[[0, 0, 3, 100]], [[0, 3, 4, recording.DROPPED]], [[0, 4, 5, 102]]]


# --- how much ---


class Counting:
    """A runner that draws the same token always."""

    lookahead = 0

    def submit(self, output):
        return lambda: [Sampled(1) if span.samples else None for span in output.spans]


def serve(num_steps, num_requests, **limits):
    """A recording of so many steps, each with a token of each request."""
    blocks = BlockManager(num_requests * (num_steps // 16 + 40), 16)
    scheduler = Scheduler(blocks, max_num_seqs=num_requests, max_num_batched_tokens=512)
    engine = LLMEngine(scheduler, Counting(), Limits(max_model_len=10**6, vocab_size=100_000))
    recorder = Recorder(engine, **limits)
    engine.observers.append(recorder)
    for number in range(num_requests):
        engine.add_request(None, list(range(50_000 + number, 50_512 + number)), SamplingParams(max_tokens=num_steps))
    while engine.has_unfinished_requests:
        engine.step()
    engine.close()
    return recorder


@pytest.fixture(scope="module")
def long_run():
    return serve(5000, 32)


def test_who_needs_blocks_is_known_and_not_looked_for(monkeypatch):
    """In each step some of 40 requests take a block: looking at all of their tables costs more than all else."""
    scheduler = Scheduler(BlockManager(400, 16), max_num_seqs=40, max_num_batched_tokens=8000)
    engine = LLMEngine(scheduler, Counting(), Limits(max_model_len=1000, vocab_size=1000))
    recorder = Recorder(engine)
    engine.observers.append(recorder)
    for number in range(40):
        engine.add_request(None, [1] * (20 + number), SamplingParams(max_tokens=60 if number else 30))
    engine.step()
    monkeypatch.setattr(recorder._ledger, "_scheduler", None)  # what runs is needed by who looks for it
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.observers == [recorder], "it has not failed"
    assert sum(len(step["blocks"]) for step in steps(recorder)) > 40 * 3 * 3 * 2


def test_5000_steps_of_32_requests_stay_under_20_megabytes(long_run):
    found = long_run.recording()
    assert len(found["steps"]) >= 5000 and found["dropped_steps"] == 0
    assert sum(len(step["spans"]) for step in found["steps"]) >= 5000 * 32
    size = len(recording.dump(found).encode())
    assert size < 10_000_000 and abs(size - long_run._num_bytes) < 0.05 * size, "what counts is what is written"


def test_memory_is_bounded_by_what_was_allowed(caplog):
    tracemalloc.start()
    try:
        recorder = serve(1500, 16, max_bytes=200_000)
        kept = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/nanovllm/trace/*")])
    finally:
        tracemalloc.stop()
    found = recorder.recording()
    assert 200_000 <= recorder._num_bytes < 210_000
    assert sum(trace.size for trace in kept.traces) < 300_000, "numbers in arrays, of a step some things around them"
    assert found["dropped_steps"] > 500 and len(found["steps"]) + found["dropped_steps"] >= 1500
    assert caplog.messages == [message for message in caplog.messages if "the recording is full" in message]
    assert len(caplog.messages) == 1, "it says so once"
    replay = Replay(found)
    replay.seek(len(found["steps"]))
    assert len(replay.running) == 16 and all(row["finish"] is None for row in found["requests"])


def test_steps_are_bounded_too(caplog):
    caplog.set_level(logging.WARNING)
    found = serve(100, 2, max_steps=40).recording()
    assert len(found["steps"]) == 40 and found["dropped_steps"] == len(caplog.messages) * 62 == 62

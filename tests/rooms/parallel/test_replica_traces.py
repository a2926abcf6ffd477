"""Each replica records itself: a file of each, with what it computed and no more, once the engine is closed."""

import json
import os
import signal
from pathlib import Path

import pytest

from nanovllm import LLM, ConfigError, EngineError, SamplingParams
from nanovllm.cli import main
from nanovllm.trace import recording
from nanovllm.trace.recording import of_replica
from nanovllm.trace.replay import Replay

PROMPTS = [[1, 2, 3, 4, 5], [7] * 30, [9, 8], list(range(100, 160)), [255, 0], [3] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def drawn(found, place):
    """The tokens that a recording says a request has drawn, in order."""
    spans = [span for step in found["steps"] for span in step["spans"] if span[0] == place and span[3] >= 0]
    return [token for _, _, _, token in sorted(spans, key=lambda span: span[2])]


def test_each_writes_down_what_it_computed(open_replicas, tmp_path):
    names = {f"run.replica-{place}.{ending}" for place in range(2) for ending in ("html", "json")}
    with open_replicas("qwen3", 2, trace=str(tmp_path / "run.html")) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        work = llm.llm_engine.work
        assert list(tmp_path.iterdir()) == [], "they are written when the engine is closed"
    assert {path.name for path in tmp_path.iterdir()} == names
    answers = {output.request_id: output for output in outputs}
    for place in range(2):
        found = recording.load(str(tmp_path / f"run.replica-{place}.html"))
        assert len(found["requests"]) == work[place].requests > 0 and found["dropped_steps"] == 0
        for index, row in enumerate(found["requests"]):
            output = answers.pop(row["id"])
            assert (row["prompt"], row["text"]) == (output.prompt_token_ids, output.text)
            assert drawn(found, index) == output.token_ids and row["finish"] == "length"
        replay = Replay(found)
        while replay.forward():
            pass
        assert replay.step == len(found["steps"]) - 1
        assert json.loads((tmp_path / f"run.replica-{place}.json").read_text())["traceEvents"]
    assert answers == {}, "each request is in one of them"


def test_a_replica_without_requests_writes_an_empty_one_and_a_busy_one_what_there_was(open_replicas, tmp_path):
    llm = open_replicas("qwen3", 2, trace=str(tmp_path / "run.recording.json"))
    llm.llm_engine.add_request("long", [1, 2], LONG, stream=True)
    while not llm.llm_engine.step():
        pass
    llm.close()
    busy, idle = sorted(
        (recording.load(str(tmp_path / f"run.replica-{place}.recording.json")) for place in range(2)),
        key=lambda found: -len(found["steps"]),
    )
    assert idle["requests"] == idle["steps"] == []
    (row,) = busy["requests"]
    assert row["finish"] in (None, "length") and 0 < len(drawn(busy, 0)) <= 200


def test_the_last_reference_writes_too(open_replicas, tmp_path):
    llm = open_replicas("qwen3", 2, trace=str(tmp_path / "run.recording.json"))
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    del llm
    found = [recording.load(str(tmp_path / f"run.replica-{place}.recording.json")) for place in range(2)]
    assert sum(len(each["requests"]) for each in found) == len(PROMPTS)


def test_what_a_lost_engine_recorded_is_lost_and_the_log_says_so(open_replicas, tmp_path, traces, caplog):
    llm = open_replicas("qwen3", 2, trace=str(tmp_path / "run.recording.json"))
    llm.generate([[1]], GREEDY, use_tqdm=False)
    os.kill(llm.llm_engine._fleet._workers[1].process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="replica 1 died"):
        for _ in range(100):
            llm.generate([[1], [2]], LONG, use_tqdm=False)
    llm.close()
    assert "replica 1 did not end by itself: what it recorded is lost" in caplog.text
    assert not list(tmp_path.glob("run*"))
    traces()


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("run.txt", "must end in .html"), (".html", "must end in .html"), ("no/such/run.html", "folder that exists"),
        ("taken.html", "brings .*taken.replica-1.json with it, and there is another file of that name"),
        ("", "must be a file, and this is a folder"),
    ],
)  # fmt: skip
def test_a_bad_path_is_refused_before_anything_starts(tmp_path, traces, path, rule):
    (tmp_path / "taken.replica-1.json").write_text('{"name": "somebody\'s"}')
    with pytest.raises(ConfigError, match=rule) as refused:
        LLM("there-is-no-such-model", data_parallel_size=2, trace=str(tmp_path / path))
    assert refused.value.parameter == "trace" and str(tmp_path) in refused.value.value
    traces()


@pytest.mark.parametrize("more", [{}, {"trace": "run.html"}], ids=["live", "both"])
def test_a_live_page_is_of_one_engine(traces, more):
    with pytest.raises(ConfigError, match="live needs data_parallel_size=1, not 2: .* Take trace=") as refused:
        LLM("there-is-no-such-model", data_parallel_size=2, live=0, **more)
    assert (refused.value.parameter, refused.value.value) == ("live", 0)
    traces()


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("run.html", "run.replica-3.html"), ("a.b/run.recording.json", "a.b/run.replica-3.recording.json"),
        ("~/x.y.html", "~/x.y.replica-3.html"), ("run.html/", "run.replica-3.html"), ("run.txt", "run.txt"),
        ("a/.html", "a/.html"), (".recording.json", ".recording.json"), ("", ""), ("..", ".."),
    ],
)  # fmt: skip
def test_the_name_of_a_replica_s_file(path, named):
    assert of_replica(path, 3) == named


def test_the_command_names_the_files(folders, tmp_path, capsys):
    target, options = tmp_path / "run.html", ["-o", "num_gpu_blocks_override=32", "--dtype", "float32"]
    command = ["trace", "one", "two", "--model", str(folders["llama"]), "--data-parallel-size", "2", *options]
    assert main([*command, "--max-tokens", "4", "-o", str(target)]) == 0
    said = capsys.readouterr().err
    for place in range(2):
        file = Path(of_replica(str(target), place))
        assert f"written: {file}\n" in said and f"nanovllm explain {file}" in said
        assert main(["explain", str(file)]) == 0

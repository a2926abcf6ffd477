"""Explanations in words, the two commands, and docs/trace.md."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import SamplingParams
from nanovllm.cli import main
from nanovllm.trace import explain, recording
from nanovllm.trace.perfetto import label
from nanovllm.trace.recording import TraceError

DOCS_FOLDER = Path(__file__).parents[3] / "docs"
DOCS = (DOCS_FOLDER / "trace.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


def request(name, prompt, **facts):
    usual = dict(id=name, sample=0, arrived=0, before_step=0, queued_step=0, prompt=prompt, priority=0, rank=0,
                 max_tokens=9, params={}, cached=0, ended=None, end_step=None, gone_step=None, finish=None, stop=None,
                 text="")  # fmt: skip
    return usual | facts


@pytest.fixture
def told():
    """Request "b" waits for "a", finds two of its blocks, comes in two chunks, and is preempted for it."""
    steps = [
        dict(t=[10, 20, 30, 40, 100, 110], spans=[[0, 0, 12, 7]], preempted=[], wait=None,
             blocks=[0, 0, 0, 0, 1, 0, 0, 2, 0]),
        dict(t=[110, 120, 130, 140, 200, 210], spans=[[0, 12, 13, 8]], preempted=[], wait="blocks",
             blocks=[3, 0, 0, 3, 1, 0, 0, 3, 0]),
        dict(t=[210, 220, 230, 240, 400, 410], spans=[[0, 13, 14, 9], [1, 8, 10, -1]], preempted=[], wait=None,
             blocks=[1, 0, 1, 1, 1, 1, 0, 4, 1]),
        dict(t=[410, 420, 430, 440, 500, 510], spans=[[0, 14, 15, 5], [1, 10, 12, 6]], preempted=[], wait=None,
             blocks=[]),
        dict(t=[510, 520, 530, 540, 600, 610], spans=[[0, 15, 16, 4]], preempted=[1], wait="preempted",
             blocks=[2, 4, 1, 2, 1, 1, 2, 0, 1, 0, 4, 0]),
    ]  # fmt: skip
    requests = [
        request("a", list(range(12)), ended=620, end_step=4, gone_step=5, finish="stop", stop="!"),
        request("b", list(range(12)), arrived=60, before_step=1, queued_step=1, cached=8),
    ]
    return {"format": recording.FORMAT, "version": 1, "engine": {"num_blocks": 6, "device": "cuda"}, "texts": {},
            "requests": requests, "steps": steps, "tail": [], "dropped_steps": 0}  # fmt: skip


def test_a_story_has_everything_that_happened(told):
    assert explain.explain(told, "b").split("\n  ") == [
        "request b: 12 prompt tokens, 1 drawn, 0.6 ms",
        "came before step 1, was admitted in step 2 (and after being preempted, 0.2 ms in all); first in the queue "
        "for 1 step because not enough blocks of the cache were free, for 1 step because somebody had just been "
        "preempted for want of blocks",
        "found in the cache: 8 of its prompt's tokens: 2 blocks of request a",
        "computed in 2 chunks: [8, 10) in step 2, [10, 12) in step 3",
        "preempted 1 time: in step 4 for request a; what the cache had not kept was computed again",
        "first token after 0.4 ms",
        "where its time went: waiting 0.2 ms (45%), its prompt 0.3 ms (55%)",
        "in its steps the host only waited for the device for 0.2 ms (73%)",
        "it was still going when the recording stopped",
    ]
    story = explain.explain(told, "a")
    assert "2 of its 4 decodes shared the step with prompts of others, 0.1 ms each; the others 0.1 ms" in story
    assert story.endswith("ended after step 4 (stop): its text came to an end, at '!'")


def test_the_parts_of_a_life_are_the_whole(workload):
    """Waiting and steps do not overlap, for any request of any workload, but for one event's rounding."""
    for seed in range(40):
        found = workload(seed).serve()
        for story, row in zip(explain.stories(found), found["requests"], strict=True):
            parts = story.waiting + story.prefill + story.decode
            assert 0 <= parts <= story.until - row["arrived"] + 2, f"seed {seed}"
            assert len(story.preempted) == sum(step["preempted"].count(story.place) for step in found["steps"])
            assert story.num_decodes + len(story.chunks) == sum(
                span[0] == story.place for step in found["steps"] for span in step["spans"]
            )
            assert explain.explain(found, label(row)).startswith(f"request {label(row)}: ")


def test_blocks_that_several_hold_are_counted_once():
    found = recording.load(DOCS_FOLDER / "recordings" / "prefix-hit.recording.json")
    assert "16 of its prompt's tokens: 4 blocks of requests 0 and 1\n" in explain.explain(found, "2")
    assert explain._holders("abcdefgh", tuple(range(8))) == "requests a, b, c, d, e, f and 2 more"
    assert explain._holders("abc", (1,)) == "request b"


def test_samples_say_what_they_waited_for_and_whose_blocks_they_found(open_llm, tmp_path):
    target = tmp_path / "run.html"
    with open_llm(trace=str(target), max_num_batched_tokens=64) as llm:
        params = SamplingParams(n=3, max_tokens=4, ignore_eos=True)
        llm.generate([list(range(44))], params, use_tqdm=False)
    found = recording.load(target)
    first, second, third = (explain.explain(found, name) for name in ("0", "0/1", "0/2"))
    assert "in the queue" not in first and "5 blocks of request 0\n" in second
    assert "first in the queue for 1 step because another one computed what its prompt begins with" in second
    assert "5 blocks of requests 0 and 0/1\n" in third, "who came before it, and nobody who came after"


def test_who_outgrew_the_cache_did_not_have_all_its_tokens(told):
    told["requests"][0] |= {"finish": "length", "stop": None, "max_tokens": 6}
    assert explain.explain(told, "a").endswith("(length): it grew until the cache could hold no more of it")
    told["requests"][0]["max_tokens"] = 5
    assert explain.explain(told, "a").endswith("(length): it had all the tokens that it may have")


def test_who_is_aborted_before_any_step_has_a_story(open_llm, tmp_path):
    target = tmp_path / "run.html"
    with open_llm(trace=str(target)) as llm:
        llm.llm_engine.add_request("gone", [1, 2, 3], SamplingParams(max_tokens=4))
        llm.llm_engine.abort("gone")
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    story = explain.explain(recording.load(target), "gone").split("\n  ")
    assert story[1].startswith("never admitted: came before step 0, waited ")
    assert story[-1] == "ended before the first step (abort): its caller aborted it"


def test_what_is_computed_again_is_not_called_a_prompt(told):
    told["steps"].append(dict(t=[610, 620, 630, 640, 700, 710], spans=[[1, 0, 13, 6]], preempted=[], wait=None,
                              blocks=[]))  # fmt: skip
    assert "its prompt, and what was computed again 0.4 ms" in explain.explain(told, "b")


def test_a_name_cannot_give_commands_to_the_terminal(told, tmp_path, capsys):
    told["requests"][0]["id"] = "a\x1b[2J\nb"
    (tmp_path / "run.recording.json").write_text(recording.dump(told))
    assert main(["explain", str(tmp_path / "run.recording.json"), "b"]) == 0
    assert main(["explain", str(tmp_path / "run.recording.json")]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\\x1b[2J" in printed


def test_the_slowest_is_marked(told):
    lines = explain.table(told).splitlines()
    assert lines[0].split()[:2] == ["request", "prompt"] and len(lines) == 3
    assert [line.split()[0] for line in lines if "<- slowest" in line] == ["a"]


def test_an_unknown_request_is_refused_with_the_known(told):
    with pytest.raises(TraceError, match=r"request 'c' is not in the recording.* Give one of: a, b\.") as refused:
        explain.explain(told, "c")
    assert (refused.value.parameter, refused.value.value) == ("request", "c")


def test_the_commands(folder, tmp_path, capsys):
    target = tmp_path / "run.html"
    options = [
        "--model",
        str(folder),
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "-o",
        "num_gpu_blocks_override=32",
    ]
    tokens = ["--max-tokens", "5", "--temperature", "0"]
    assert main(["trace", "one", "two", *options, *tokens, "-o", str(target), "--alternatives", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("--- one\n") and f"written: {target}" in err and "run.json" in err
    found = recording.load(target)
    assert found["requests"][0]["params"]["logprobs"] == 2 and "top" in found["steps"][0]
    assert main(["explain", str(target)]) == 0
    assert "<- slowest" in capsys.readouterr().out
    assert main(["explain", str(target), "1"]) == 0
    assert capsys.readouterr().out.startswith("request 1: 3 prompt tokens, ")
    assert main(["explain", str(target), "nobody"]) == 2
    assert "Give one of: 0, 1." in capsys.readouterr().err
    other = tmp_path / "generate.recording.json"
    assert main(["generate", "one", *options, *tokens, "--trace", str(other)]) == 0
    assert len(recording.load(other)["requests"]) == 1


@pytest.mark.parametrize("number", ["0", "21", "x"])
def test_alternatives_that_no_recording_holds_are_refused_before_a_file_is_replaced(tmp_path, capsys, number):
    kept = tmp_path / "run.html"
    kept.write_text("kept")
    with pytest.raises(SystemExit):
        main(["trace", "one", "--alternatives", number, "-o", str(kept)])
    assert "is not a whole number of 1 to 20" in capsys.readouterr().err and kept.read_text() == "kept"


def test_a_trace_that_could_not_be_written_is_no_success(folder, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    options = ["--load-format", "dummy", "--dtype", "float32", "-o", "num_gpu_blocks_override=32", "--max-tokens", "2"]
    assert main(["trace", "one", "--model", str(folder), *options, "--output", str(tmp_path / "run.html")]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("--- one\n") and "has not been written" in err


def test_explaining_needs_no_torch(tmp_path):
    code = (
        "import sys; from nanovllm.cli import main\n"
        "assert main(['explain', 'no-such-file']) == 2; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "cannot be read" in done.stderr, done.stderr


def test_there_are_examples_to_run():
    assert len(BLOCKS) == DOCS.count("```python") == 3


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_the_examples_run(folder, tmp_path, capsys, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    opened = f"{str(folder)!r}, load_format='dummy', dtype='float32', num_gpu_blocks_override=64"
    code = BLOCKS[place].replace('"smollm2-135m-instruct"', opened)
    assert code != BLOCKS[place]
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    assert capsys.readouterr().out.strip()

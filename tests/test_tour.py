"""The recordings and figures of the tour are those that docs/recordings.py makes, and show what they are said to."""

import importlib.util
from pathlib import Path

import pytest

from nanovllm import cli
from nanovllm.trace.explain import explain
from nanovllm.trace.recording import EVICT, HOLD, load

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("recordings", DOCS / "recordings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recording(name):
    return load(DOCS / "recordings" / f"{name}.recording.json")


def test_they_are_up_to_date(script):
    recordings, tour = script.made()
    for name, text in recordings.items():
        assert (DOCS / "recordings" / f"{name}.recording.json").read_text(encoding="utf-8") == text, name
        assert len(text) < 60_000
    assert (DOCS / "tour.md").read_text(encoding="utf-8") == tour, "run python docs/recordings.py"
    assert {path.name.partition(".")[0] for path in (DOCS / "recordings").iterdir()} == set(recordings)


def spans_of(made, request):
    return [next((span for span in step["spans"] if span[0] == request), None) for step in made["steps"]]


def test_continuous_batching():
    made = recording("continuous-batching")
    came = [row["before_step"] for row in made["requests"]]
    ended = [row["end_step"] for row in made["requests"]]
    assert came == sorted(came) and len(set(came)) > 2
    assert ended[2] < ended[0] < ended[1], "one that came later ends first, and the others go on"
    for place, row in enumerate(made["requests"]):
        there = spans_of(made, place)[row["before_step"] : row["end_step"] + 1]
        assert None not in there, "nobody waits"


def test_chunked_prefill():
    made = recording("chunked-prefill")
    chunks = [span for span in spans_of(made, 1) if span and span[2] <= 40]
    assert len(chunks) == 4 and chunks[-1][2] == 40
    assert None not in spans_of(made, 0), "a token in every step"
    assert max(sum(stop - start for _, start, stop, _ in step["spans"]) for step in made["steps"]) == 12


def test_prefix_hit():
    made = recording("prefix-hit")
    assert [row["cached"] for row in made["requests"]] == [0, 16, 16]
    codes = [code for step in made["steps"] for code in step["blocks"][::3]]
    assert codes.count(HOLD) == 8


def test_preemption():
    made = recording("preemption")
    (step,) = [place for place, step in enumerate(made["steps"]) if step["preempted"]]
    assert made["steps"][step]["preempted"] == [2]
    again = next(span for span in spans_of(made, 2)[step:] if span)
    assert again[1] == 0 and again[2] > 6, "it is computed anew, what it had drawn too"
    assert "preempted" in explain(made, "2")


def test_eviction():
    made = recording("eviction")
    events = [step["blocks"][place : place + 3] for step in made["steps"] for place in range(0, len(step["blocks"]), 3)]
    evicted = [block for code, block, _ in events if code == EVICT]
    assert evicted == [1], "of blocks 0 and 1, which request 0 left first, the tail"
    assert not any(step["preempted"] for step in made["steps"])


def test_a_recording_becomes_a_page(tmp_path, capsys):
    source, target = DOCS / "recordings" / "eviction.recording.json", tmp_path / "page.html"
    assert cli.main(["page", str(source), "-o", str(target)]) == 0
    assert load(target) == load(source)
    for wrong in (tmp_path / "page.txt", tmp_path / "none" / "page.html"):
        assert cli.main(["page", str(source), "-o", str(wrong)]) == cli.BAD_INPUT
        assert str(wrong) in capsys.readouterr().err and not wrong.exists()

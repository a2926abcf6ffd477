"""docs/figures/throughput.py on output as ``nanovllm bench --sweep`` prints it (tests/rooms/cli runs the bench too)."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nanovllm.cli.bench import as_json, as_point
from nanovllm.cli.timing import Figure

SCRIPT = Path(__file__).parents[1] / "docs" / "figures" / "throughput.py"
SVG = "{http://www.w3.org/2000/svg}"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def sweep(sizes=SIZES, **more):
    """What the bench prints of steps that take 0.6 ms and 10 us for each request, on a floor of half that."""
    figures = []
    for size in sizes:
        counts = {"steps": 448, "batch_size": size, "seconds": 0.3}
        value = 0.6 + 0.01 * size
        figures.append(Figure(name=f"batch{size}", value=value, unit="ms/step", floor=value / 2, counts=counts))
    return {
        "bench": "nanovllm", "model": "qwen3 <0.6b>", "device": "NVIDIA H200", "torch": "2.11.0",
        "figures": {figure.name: as_json(figure) for figure in figures}, "errors": {},
        "sweep": [as_point(figure) for figure in figures], **more,
    }  # fmt: skip


def draw(tmp_path, text):
    source, target = tmp_path / "sweep.json", tmp_path / "throughput.svg"
    source.write_text(text)
    command = [sys.executable, str(SCRIPT), str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False), target


def places(line):
    return [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]


def test_measured_and_floor_of_both_plots(tmp_path):
    done, target = draw(tmp_path, "a table\nof lines\n" + json.dumps(sweep()) + "\n")
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size < 20_000, "small enough to be kept beside the text"
    root = ElementTree.parse(target).getroot()
    speed, speed_floor, step, step_floor = map(places, root.findall(f"{SVG}polyline"))
    assert [len(line) for line in (speed, speed_floor, step, step_floor)] == [len(SIZES)] * 4
    # y grows downwards: a floor is twice as fast, the same way up everywhere on a logarithmic axis
    assert len({round(low[1] - high[1]) for low, high in zip(speed, speed_floor, strict=True)}) == 1
    assert all(low[1] > high[1] for low, high in zip(speed, speed_floor, strict=True))
    assert all(low[1] < high[1] for low, high in zip(step, step_floor, strict=True))
    # powers of two lie evenly apart
    assert {round(b[0] - a[0]) for a, b in itertools.pairwise(step)} == {round(330 / 8)}
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"tokens a second", "milliseconds a step", "1", "256"} <= set(texts)
    assert any("qwen3 <0.6b> on NVIDIA H200" in (text or "") for text in texts)


@pytest.mark.parametrize("sizes", [(8,), (1, 256), (1, 3, 5)])
def test_rows_that_failed_are_left_out(tmp_path, sizes):
    done, target = draw(tmp_path, json.dumps(sweep(sizes)))
    assert done.returncode == 0, done.stderr
    for line in ElementTree.parse(target).getroot().findall(f"{SVG}polyline"):
        assert len(places(line)) == len(sizes)
        assert all(math.isfinite(x) and 0 <= x <= 860 and 0 <= y <= 380 for x, y in places(line))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"figures": {}}), "run nanovllm bench with --sweep"),
        (json.dumps(sweep((), errors={"batch1": "no room"})), "Rows failed: {'batch1': 'no room'}"),
        ("no JSON\n", "sweep.json: Expecting value"),
        ("", "sweep.json: Expecting value"),
    ],
)
def test_where_there_is_nothing_to_draw_one_line_says_so(tmp_path, text, message):
    done, target = draw(tmp_path, text)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    assert not target.exists()


def test_the_figure_that_readme_shows_is_drawn_from_the_figures_beside_it(tmp_path):
    source = SCRIPT.parent / "sweep.json"
    done, target = draw(tmp_path, source.read_text())
    assert done.returncode == 0, done.stderr
    assert target.read_text() == (SCRIPT.parent / "throughput.svg").read_text(), "draw it again: see throughput.py"
    found = json.loads(source.read_text())
    assert [row["batch_size"] for row in found["sweep"]] == list(SIZES) and found["gate"]
    assert "docs/figures/throughput.svg" in (SCRIPT.parents[2] / "README.md").read_text()

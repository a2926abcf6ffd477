"""Scripts that need a device cannot run everywhere, but what they are built from must be there."""

import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nanovllm.ops.kernels import TRITON

BENCH = Path(__file__).parents[1] / "bench"
SCRIPTS = sorted(path.stem for path in BENCH.glob("*.py"))
KERNELS = {"attention", "ops"}
"""They name kernels when they are imported."""


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_finds_what_it_names(name, monkeypatch):
    if name in KERNELS and not TRITON:
        pytest.skip("needs triton")
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    module = load(name)
    assert module.__doc__


def test_the_median_leaves_the_first_replays_out(monkeypatch):
    """On a stand-in for the device: the first three replays take long, and what was recorded lives until the last."""
    replays, lives, took = [], [], iter([9.0, 9.0, 9.0, 0.1, 0.3, 0.2])

    class Made:
        def __del__(self):
            lives.append("gone")

    class Graph:
        def replay(self):
            replays.append(len(lives))

    class Event:
        def __init__(self, **_): ...
        def record(self): ...
        def synchronize(self): ...
        def elapsed_time(self, _):
            return next(took)

    @contextmanager
    def record(_):
        yield

    for name, stand_in in (("CUDAGraph", Graph), ("Event", Event), ("graph", record), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert load("common").microseconds(Made, torch.zeros(2), replays=6) == pytest.approx(200)
    assert replays == [0] * 6 and lives == ["gone"]

"""Scripts that need a device cannot run everywhere, but what they are built from must be there."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_finds_the_clone_where_nothing_is_installed(name):
    """``clone`` comes first, or what brings it."""
    imported = []
    for node in ast.parse((BENCH / f"{name}.py").read_text(encoding="utf-8")).body:
        imported += [node.module] if isinstance(node, ast.ImportFrom) else []
        imported += [each.name for each in node.names] if isinstance(node, ast.Import) else []
    ours = next((place for place, module in enumerate(imported) if module.startswith("nanovllm")), None)
    assert ours is None or {"clone", "common", "comparison", "compare_vllm"} & {*imported[:ours]}


def test_a_script_runs_where_nothing_is_installed(tmp_path):
    """-S leaves out what editable installations put into a Python's path."""
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    command = [sys.executable, "-S", str(BENCH / "compare_vllm.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage: compare_vllm.py"), done.stderr


MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def fp8(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return load("fp8")


def test_runs_are_compared_where_both_know_the_token(fp8, tmp_path):
    """Three engines, of which the second computes as the first: no error there, and one in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    options = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"}
    runs = {"exact": {}, "again": {"block_size": 4, "max_num_batched_tokens": 8}, "rounded": {"dtype": "bfloat16"}}
    found = fp8.measure(str(tmp_path), [[1, 2, 3], [5] * 20], 6, options, runs)
    assert list(found) == ["again against exact", "rounded against exact", "rounded against again"]
    again, rounded = found["again against exact"], found["rounded against exact"]
    assert again["compared"] == 2 * 6 * fp8.BEST and again["not_among_the_best"] == 0
    assert again["max"] < 1e-5 and again["same_best"] == 1 and again["equal_outputs"] == again["outputs"] == 2
    assert again["tokens_alike"] == 6
    assert rounded["max"] > 1e-5 and rounded["compared"] + rounded["not_among_the_best"] == again["compared"]


def test_places_and_outputs_that_differ_are_counted(fp8):
    scores = {"a": [{1: -1.0, 2: -2.0}, {3: -0.5, 4: -3.0}], "b": [{1: -1.25, 5: -1.5}, {4: -0.5, 3: -0.75}]}
    found = fp8.compare({"a": [[1, 3], [7]], "b": [[1, 4], [7]]}, scores, "b", "a")
    assert found == {
        "mean": (0.25 + 0.25 + 2.5) / 3, "max": 2.5, "compared": 3, "not_among_the_best": 1, "same_best": 0.5,
        "equal_outputs": 1, "outputs": 2, "tokens_alike": 1.0,
    }  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be a cache of float8 here")
def test_where_there_is_no_such_cache_the_script_says_what_is_needed(fp8, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.setattr(sys, "argv", ["fp8.py", str(tmp_path)])
    assert fp8.main() == 2
    assert "kv_cache_dtype is 'fp8'; it must be 'auto' here" in capsys.readouterr().err


def test_idle_time_is_that_of_the_main_workload_unless_lengths_are_given():
    work = load("idle").work
    main, cut = work(256, None, None), work(3, 300, 7)
    assert (sum(map(len, main.prompts)), sum(main.lengths)) == (142_827, 133_966)
    assert ([len(prompt) for prompt in cut.prompts], cut.lengths) == ([7] * 3, [300] * 3)


def test_engines_of_several_processes_are_compared(monkeypatch, capsys):
    """One engine and two replicas, on a CPU; ranks differ by a number."""
    script = load("parallel")
    monkeypatch.setitem(script.SHAPES, "tiny", script.SHAPES["tiny"] | {"hidden_size": 32, "head_dim": 16})
    arguments = ["--shape=tiny", "--engines", "1x1", "1x2", "--requests=3", "--length=4", "--steps=6", "--device=cpu"]
    monkeypatch.setattr(sys, "argv", ["parallel.py", *arguments, "--threads=1"])
    script.main()
    *_, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)["results"]
    assert list(results) == ["1x1", "1x2"]
    assert all(found["tokens_per_second"] > 0 and found["step_milliseconds"] > 0 for found in results.values())
    assert results["1x1"]["throughput_ratio"] == 1 and 0.5 <= results["1x2"]["largest_part"] < 1
    assert script.sizes(script.engine("4x2")) == {"tensor_parallel_size": 4, "data_parallel_size": 2}


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

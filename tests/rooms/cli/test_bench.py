"""``nanovllm bench`` on a tiny model: what it times, the floors it states, its gate, and what it says of failures."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import nanovllm.cli.bench
from nanovllm import LLM
from nanovllm.cli import gate, main, roofline, rows, timing
from nanovllm.cli.roofline import Costs, Roof, Work
from nanovllm.cli.rows import Load, Sizes, even, mixed, select
from nanovllm.config import ModelConfig
from nanovllm.errors import ConfigError, EngineError

ROOT = Path(nanovllm.cli.__file__).parents[2]

TINY = rows.SMALL | {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
ROOF = Roof(1e9, 1e10)


@pytest.fixture
def tiny(monkeypatch):
    """A model, a roof and work so small that a row takes a moment."""
    monkeypatch.setitem(rows.SHAPES, "small", TINY)
    monkeypatch.setattr(timing, "measure_roof", lambda device, dtype: ROOF)


@pytest.fixture
def steady(tiny, monkeypatch):
    """A clock that nothing disturbs: a pass takes half a second, and 10 ms for each token of its longest output."""
    monkeypatch.setattr(timing, "timed", lambda llm, load, **params: 0.5 + 0.01 * max(load.lengths))


def bench(capsys, *arguments, status=0):
    """Run the command; return the lines of the table and the JSON."""
    assert main(["bench", "--device", "cpu", *arguments]) == status
    *table, last = capsys.readouterr().out.splitlines()
    return table, json.loads(last)


# the command


def test_the_table_and_the_json_say_the_same_and_add_up(tiny, capsys):
    table, found = bench(capsys, "--rows", "prefill,main", "--num-requests", "4", "--min-len", "2", "--max-len", "9")
    load = mixed(4, 2, 9, 127)
    main_row, prefill = found["figures"]["main"], found["figures"]["prefill"]
    assert main_row["tokens"] == sum(load.lengths)
    assert main_row["prompt_tokens"] == prefill["tokens"] == sum(map(len, load.prompts))
    for figure in (main_row, prefill):
        assert figure["value"] == pytest.approx(figure["tokens"] / figure["seconds"]) and figure["unit"] == "tokens/s"
        assert figure["share"] == pytest.approx(figure["value"] / figure["floor"]) and 0 < figure["share"] < 1
    assert found["gate"] == ["alone = among others", "logits are finite"]
    assert found["errors"] == {} and found["interrupted"] is False
    assert found["model"] == "small" and found["copy_bytes_per_second"] == 1e9
    lines = {line.split()[0]: line for line in table if line}
    assert nanovllm.cli.bench.number(main_row["value"]) in lines["main"] and "tokens/s" in lines["main"]
    assert "vLLM" not in "".join(table), "figures of another machine and another size are no comparison"
    assert list(lines).index("main") < list(lines).index("prefill"), "rows come in the table's order"


def test_a_step_is_the_difference_of_two_lengths(steady, capsys):
    _, found = bench(capsys, "--rows", "batch8", "--scale", "0.125")
    figure = found["figures"]["batch8"]
    assert (figure["steps"], figure["batch_size"]) == (64 - 8, 8)
    assert figure["value"] == pytest.approx(10.0) == figure["seconds"] / figure["steps"] * 1e3
    assert figure["share"] == pytest.approx(figure["floor"] / 10.0)


def test_replicas_are_timed_as_one_engine_and_have_a_gate_of_their_own(tiny, capsys, monkeypatch):
    opened = []
    plain = timing.LLM
    monkeypatch.setattr(timing, "LLM", lambda *args, **options: opened.append(plain(*args, **options)) or opened[-1])
    _, found = bench(capsys, "--rows", "prefill,batch8", "--scale", "0.05", "--data-parallel-size", "2")
    assert found["errors"] == {} and set(found["figures"]) == {"prefill", "batch8"}
    assert found["options"]["data_parallel_size"] == 2 and [llm.config.data_parallel_size for llm in opened] == [2]
    assert "data_parallel_size" in gate.GATE_OPTIONS and "tensor_parallel_size" in gate.GATE_OPTIONS


def test_options_of_sampling_are_compared_with_the_plain_figure(steady, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "timed", lambda llm, load, **params: asked.append(params) or 1.0 + len(params))
    table, found = bench(capsys, "--rows", "cut300", "--scale", "0.01")
    assert list(found["figures"]) == ["cut300", "cut300_top_p", "cut300_top_k", "cut300_logprobs"]
    assert [asked[place] for place in (0, 2, 4, 6)] == [{}, {"top_p": 0.95}, {"top_k": 50}, {"logprobs": 5}]
    assert found["figures"]["cut300_top_p"]["note"] == "-50.0% against plain"
    assert any("-50.0% against plain" in line for line in table)


def test_the_shared_row_also_says_what_copies_would_cost(tiny, capsys):
    _, found = bench(capsys, "--rows", "shared", "--scale", "0.02")
    figure = found["figures"]["shared"]
    assert figure["prompt_tokens"] == 5 * (36 + 2) and figure["tokens"] == 5 * 2
    assert "if every request reads a copy of its own" in figure["note"]


def test_a_sweep_is_what_the_plot_draws(steady, capsys, tmp_path):
    _, found = bench(capsys, "--sweep", "--scale", "0.05")
    points = found["sweep"]
    assert [point["batch_size"] for point in points] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert all(point["tokens_per_second"] == pytest.approx(point["batch_size"] * 100) for point in points)
    assert all(point["floor_ms_per_step"] > 0 for point in points)
    source, target = tmp_path / "sweep.json", tmp_path / "throughput.svg"
    source.write_text("a table\n" + json.dumps(found) + "\n")
    script = ROOT / "docs" / "figures" / "throughput.py"
    subprocess.run([sys.executable, str(script), str(source), str(target)], check=True, timeout=60)
    drawn = ElementTree.parse(target).getroot()
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4 and all(len(line.get("points").split()) == 9 for line in lines)
    for line in lines:
        places = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        assert all(math.isfinite(x) and 0 <= x <= 860 and 0 <= y <= 380 for x, y in places)
        assert [x for x, _ in places] == sorted(x for x, _ in places)


def test_json_only(steady, capsys):
    table, found = bench(capsys, "--rows", "batch1", "--scale", "0.05", "--json-only")
    assert table == [] and list(found["figures"]) == ["batch1"]


def test_a_folder_and_its_options_are_passed_on(steady, capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 512}))
    opened = []

    class Recorded(LLM):
        def __init__(self, model, **options):
            opened.append((model, options))
            super().__init__(model, **options)

    for module in (gate, timing):
        monkeypatch.setattr(module, "LLM", Recorded)
    options = ["--model", str(tmp_path), "--load-format", "dummy", "-o", "block-size=32", "--dtype", "float32"]
    _, found = bench(capsys, "--rows", "main,prefill,batch1", "--scale", "0.02", *options)
    assert found["model"] == str(tmp_path)
    assert found["options"] == {"dtype": "float32", "device": "cpu", "load_format": "dummy", "block_size": 32}
    (_, gates), (model, ours) = opened
    assert gates["block_size"] == 32 and gates["dtype"] == "float32", "the gate's engine computes as the timed one"
    assert model == str(tmp_path) and ours["block_size"] == 32 and ours["max_model_len"] == 512
    assert len(opened) == 2, "rows that want the same engine share it"


# what goes wrong


def test_a_row_that_fails_says_so_and_the_others_go_on(steady, capsys, monkeypatch):
    def fail(session, name, row):
        raise torch.OutOfMemoryError("no room\nfor this")
        yield

    monkeypatch.setitem(timing.KINDS, "prefill", fail)
    table, found = bench(capsys, "--rows", "main,prefill,long1", "--scale", "0.01", status=1)
    assert found["errors"] == {"prefill": "OutOfMemoryError: no room for this"}
    assert list(found["figures"]) == ["main", "long1"]
    assert [line for line in table if "failed" in line] == [
        "prefill          failed: OutOfMemoryError: no room for this"
    ]


def test_an_option_that_the_machine_does_not_have_fails_its_row_alone(steady, capsys):
    _, found = bench(capsys, "--rows", "batch1,main_fp8", "--scale", "0.01", status=1)
    assert list(found["figures"]) == ["batch1"] and "kv_cache_dtype" in found["errors"]["main_fp8"]


def test_ctrl_c_keeps_what_has_been_found(steady, capsys, monkeypatch):
    def interrupt(session, name, row):
        raise KeyboardInterrupt
        yield

    monkeypatch.setitem(timing.KINDS, "prefill", interrupt)
    table, found = bench(capsys, "--rows", "batch1,prefill,long1", "--scale", "0.01", status=130)
    assert list(found["figures"]) == ["batch1"] and found["interrupted"] is True
    assert any(line.startswith("batch1 ") for line in table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "main,batch2"], "no row 'batch2'. Did you mean 'batch"),
        (["--rows", "big", "--model", "x"], "big_batch1, big_main, with shapes of their own, beside --model"),
        (["--min-len", "5", "--max-len", "4"], "--min-len is 5 and --max-len 4"),
        (["-o", "bloc_size=16"], "Did you mean 'block_size'?"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(tiny, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(nanovllm.cli.bench, "gate", lambda options: pytest.fail("the gate has run"))
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


@pytest.mark.parametrize("scale", ["0", "-1", "x", "inf", "nan"])
def test_a_scale_is_a_number_above_0(capsys, scale):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--scale", scale])
    assert caught.value.code == 2


def test_no_figure_for_outputs_of_another_length(tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu"}
    with LLM(tmp_path, max_model_len=16, **options) as llm, pytest.raises(EngineError, match="1 of 2 outputs"):
        timing.timed(llm, Load(prompts=[[1] * 4, [2] * 12], lengths=[8, 8]))


# the gate

CPU = {"device": "cpu"}


def test_the_gate_opens_for_the_engine_as_it_is(tiny):
    assert gate.gate(CPU) == ["alone = among others", "logits are finite"]
    half = gate.gate(CPU | {"attention_backend": "flash_attn"})  # it has no float32
    assert half[2:] == ["attention by flash_attn not asked"]


def test_the_gate_finds_a_request_that_sees_its_neighbour(tiny, monkeypatch):
    plain = LLM.generate

    def faulty(self, prompts, *arguments, **options):
        return plain(self, [[*prompts[1][-1:], *prompt[1:]] for prompt in prompts] if len(prompts) > 1 else prompts,
                     *arguments, **options)  # fmt: skip

    monkeypatch.setattr(LLM, "generate", faulty)
    with pytest.raises(EngineError, match="the gate is shut: request 0 .* alone .* among others"):
        gate.gate(CPU)


def test_the_gate_finds_the_same_token_with_another_probability(tiny, monkeypatch):
    plain = gate.drawn_logprobs
    moved = iter([0.0, 0.02])
    monkeypatch.setattr(gate, "drawn_logprobs", lambda output: [x + next(moved, 0.0) for x in plain(output)])
    with pytest.raises(EngineError, match=r"log-probabilities 0\.02 apart"):
        gate.gate(CPU)


def test_the_gate_finds_logits_that_are_no_numbers(tiny, monkeypatch):
    monkeypatch.setattr(gate, "drawn_logprobs", lambda output: [math.nan])
    with pytest.raises(EngineError, match="not finite"):
        gate.gate(CPU)


@pytest.mark.gpu
def test_on_a_gpu_the_gate_compares_graphs_too():
    assert gate.gate({})[2:] == ["graphs on = graphs off"]
    assert gate.gate({"enforce_eager": True})[2:] == []


def test_a_shut_gate_lets_no_figure_through(tiny, capsys, monkeypatch):
    monkeypatch.setattr(gate, "GATE_TOLERANCE", -1.0)
    assert main(["bench", "--device", "cpu", "--rows", "main"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "the gate is shut" in err


# floors, by hand

HAND = ModelConfig.from_dict({
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 10, "hidden_size": 4, "intermediate_size": 8,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
    "tie_word_embeddings": True,
})  # fmt: skip
COSTS = Costs(config=HAND, num_parameters=1000, weight_itemsize=2, cache_itemsize=2, max_num_seqs=256)


def load_of(*requests, shared=0):
    return Load(prompts=[[0] * prompt for prompt, _ in requests], lengths=[n for _, n in requests], shared=shared)


def test_the_floor_of_decoding_by_hand():
    # Two steps follow the first token: both requests, then the longer one. Contexts: 6 and 7 of one, 11 of the other.
    work = COSTS.decode(load_of((5, 3), (10, 2)))
    token = 2 * 1 * 2 * 2 * 3  # keys and values, 1 head of 2 channels, 2 bytes, 3 layers
    assert work.num_bytes == 2 * 1000 * 2 + (6 + 7 + 11) * token
    assert work.num_flops == 3 * 2 * 1000 + 4 * 2 * 2 * (6 + 7 + 11) * 3
    assert COSTS.decode(load_of((5, 3)), first=2).num_bytes == 1000 * 2 + 7 * token
    assert replace(COSTS, max_num_seqs=1).decode(load_of((5, 3), (10, 2))).num_bytes == work.num_bytes + 1000 * 2


def test_shared_tokens_are_read_once_a_step_and_computed_once():
    apart, together = load_of((6, 3), (6, 3)), load_of((6, 3), (6, 3), shared=4)
    token = 2 * 1 * 2 * 2 * 3
    assert COSTS.decode(apart).num_bytes - COSTS.decode(together).num_bytes == 2 * 4 * token
    assert COSTS.decode(apart).num_flops == COSTS.decode(together).num_flops
    head, pairs = 10 * 4, 21 + 21
    assert COSTS.prefill(apart).num_flops == 2 * 12 * (1000 - head) + 2 * 2 * head + 16 * pairs * 3
    assert COSTS.prefill(together).num_flops == 2 * 8 * (1000 - head) + 2 * 2 * head + 16 * (pairs - 10) * 3


def test_windows_and_an_embedding_of_its_own():
    windowed = replace(COSTS, config=replace(HAND, windows=(None, 4, None)))
    token = 2 * 1 * 2 * 2
    assert windowed.decode(load_of((5, 3))).num_bytes == 2 * 1000 * 2 + token * (2 * (6 + 7) + 4 + 4)
    untied = replace(COSTS, config=replace(HAND, tie_word_embeddings=False))
    assert untied.decode(load_of((5, 2))).num_bytes == (1000 - 40) * 2 + 6 * token * 3


def test_the_slower_of_two_limits_counts():
    assert Work(2e9, 1e10).seconds(ROOF) == 2.0 and Work(1e9, 3e10).seconds(ROOF) == 3.0


def test_the_roof_is_measured(monkeypatch):
    monkeypatch.setitem(roofline.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(roofline.PRODUCT_SIZE, "cpu", 64)
    roof = roofline.measure_roof(torch.device("cpu"), torch.float32)
    assert roof.bytes_per_second > 1e6 and roof.flops_per_second > 1e6


def test_the_floor_of_the_main_workload_is_the_one_that_was_worked_out_for_an_h200():
    config = ModelConfig.from_dict(rows.QWEN3_0_6B)
    parameters = timing.count_parameters(config)
    costs = Costs(config=config, num_parameters=parameters, weight_itemsize=2, cache_itemsize=2, max_num_seqs=256)
    assert parameters == 596_049_920
    work = costs.decode(mixed(256, 100, 1024))
    assert work.num_bytes / 1e12 == pytest.approx(13.85 + 1.22, abs=0.01)


def test_the_floor_of_several_engines_is_that_of_one_with_its_share():
    """On GPUs each has devices of its own, on a CPU a share of it; all read the weights."""
    load = load_of((5, 3), (10, 2), (5, 3), (10, 2), (7, 9))
    assert [share.lengths for share in load.parts(2)] == [[3, 3, 9], [2, 2]]
    assert [share.lengths for share in load_of((1, 2)).parts(3)] == [[2]]

    def seconds(kind, **sizes):
        sizes = {"tensor_parallel_size": 1, "data_parallel_size": 1, "max_num_seqs": 256} | sizes
        llm = SimpleNamespace(config=SimpleNamespace(**sizes))
        session = SimpleNamespace(costs=lambda *_: COSTS, roof=ROOF, plan=SimpleNamespace(device=torch.device(kind)))
        return timing.Session.floor_seconds(session, None, llm, load, Costs.decode)

    assert seconds("cuda") == seconds("cpu") == COSTS.decode(load).seconds(ROOF)
    assert seconds("cuda", tensor_parallel_size=2) == seconds("cuda") / 2
    assert seconds("cpu", tensor_parallel_size=2) == seconds("cpu")
    first_done = COSTS.decode(load.parts(2)[1]).seconds(ROOF)
    assert seconds("cuda", data_parallel_size=2) == first_done
    assert seconds("cpu", data_parallel_size=2) == 2 * first_done
    assert seconds("cuda", data_parallel_size=2, tensor_parallel_size=4) == first_done / 4


# rows and workloads


def test_the_main_workload_is_the_one_that_others_measure():
    load = Sizes().load(rows.ROWS["main"])
    assert (sum(map(len, load.prompts)), sum(load.lengths)) == (142_827, 133_966)
    assert max(map(max, load.prompts)) <= 10_000


def test_even_loads():
    load = even(3, 2, 5, shared=4, seed=1)
    assert [len(prompt) for prompt in load.prompts] == [6] * 3 and load.lengths == [5] * 3
    assert len({tuple(prompt[:4]) for prompt in load.prompts}) == 1 and len({tuple(p) for p in load.prompts}) == 3
    assert load.cut(2).lengths == [2] * 3 and load.cut(2).shared == 4


def test_which_rows_are_timed():
    assert list(select(None, device="cuda")) == list(rows.ROWS)
    assert not set(select(None, device="cpu")) & set(rows.GPU_ONLY)
    assert "big_main" not in select(None, device="cuda", own_model=True)
    assert list(select(["start", "big", "main"], device="cpu")) == ["main", "start", "big_main", "big_batch1"]
    assert list(select(None, sweep=True, device="cpu")) == list(rows.SWEEP)
    with pytest.raises(ConfigError, match="Did you mean 'prefill'"):
        select(["prefil"], device="cpu")


def test_every_row_can_be_timed_and_every_peer_has_a_row():
    figures = {name + suffix for name, row in rows.ROWS.items() for suffix in row.variants}
    assert set(rows.PEERS) <= figures
    assert {row.kind for row in (rows.ROWS | rows.SWEEP).values()} == set(timing.KINDS)
    assert {row.shape for row in rows.ROWS.values()} <= {None, *rows.SHAPES}


# processes of their own


def test_the_start_of_a_process_is_the_sum_of_its_parts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_model_len": 64}
    parts = timing.first_token(str(tmp_path), options)
    total = parts.pop("total_seconds")
    assert list(parts) == ["python_seconds", "import_seconds", "load_seconds", "first_token_seconds"]
    assert all(took >= 0 for took in parts.values()) and total == pytest.approx(sum(parts.values()))


def test_a_start_that_fails_says_why(monkeypatch, tmp_path):
    class Done:
        returncode, stdout, stderr = 1, "", "a traceback\nCheckpointError: no config.json"

    monkeypatch.setattr(timing.subprocess, "run", lambda *arguments, **options: Done())
    with pytest.raises(EngineError, match=r"status 1: CheckpointError: no config\.json"):
        timing.first_token(str(tmp_path), {})


VLLM = '''
"""A stand-in for vLLM: it answers at once with as many tokens as were asked for."""
import atexit
from types import SimpleNamespace as Space

atexit.register(print, "INFO 12-01 00:00:00 [core.py:1] it logs to standard output, up to its end")
__version__ = "0.0"
SamplingParams = Space

class LLM:
    def __init__(self, **options):
        assert options["load_format"] == "dummy" and options["max_num_seqs"] == 7 and options["max_model_len"] == 4096

    def generate(self, prompts, params, use_tqdm):
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        return [Space(outputs=[Space(token_ids=[0] * each.max_tokens)]) for each in params]
'''


def python(*arguments, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def script(name, *arguments, **environment):
    return python(str(ROOT / "bench" / name), *arguments, **environment)


def without(folder, name):
    """A folder that makes the import of ``name`` fail, as if it were not installed."""
    (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}')")
    return f"{ROOT}{os.pathsep}{folder}"


def test_without_vllm_the_comparison_is_refused_in_one_line(tmp_path):
    done = script("compare_vllm.py", "--scale", "0.01", PYTHONPATH=without(tmp_path, "vllm"))
    assert done.returncode == 2 and done.stdout == ""
    assert "vLLM cannot be imported" in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture
def comparison(monkeypatch):
    """Load a script of bench/ in this process, with canned figures of ours: 10 tokens/s."""

    def load(name):
        monkeypatch.syspath_prepend(str(ROOT / "bench"))
        spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.asked = []

        def ours(model, scale, device, options):
            module.asked.append((scale, device, options))
            tokens = sum(module.main_load(model, scale).lengths)
            return {"value": 10.0, "tokens": tokens, "seconds": tokens / 10, "device": "a CPU", "gate": ["the law"]}

        monkeypatch.setattr(module, "time_ours", ours)
        return module

    return load


def test_vllm_is_timed_beside_ours(comparison, tmp_path, monkeypatch, capsys):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = comparison("compare_vllm")
    monkeypatch.setattr(sys, "argv", ["x", "--scale", "0.01", "-o", "block_size=32", "--vllm", "max_num_seqs=7"])
    assert module.main() == 0
    assert module.asked == [(0.01, "auto", ["load_format=dummy", "block_size=32"])]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["theirs"]["version"] == "0.0" and found["theirs"]["tokens"] == found["ours"]["tokens"]
    assert found["ratio"] == pytest.approx(10.0 / found["theirs"]["value"])
    assert found["gate"] == ["the law", "outputs have the lengths asked for"]


def test_ours_is_timed_by_the_command(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    module = importlib.import_module("comparison")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    figure = module.time_ours(str(tmp_path), 0.01, "cpu", ["load_format=dummy"])
    assert figure["value"] == pytest.approx(figure["tokens"] / figure["seconds"]) and "CPU" in figure["device"]
    assert figure["gate"] == ["alone = among others", "logits are finite"]


def test_without_transformers_the_comparison_is_refused_in_one_line():
    code = "import sys; sys.modules['transformers'] = None; sys.path.insert(0, sys.argv[1]); import runpy;"
    code += "sys.argv = ['x']; runpy.run_path(sys.path[0] + '/compare_transformers.py', run_name='__main__')"
    done = python("-c", code, str(ROOT / "bench"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("transformers is not installed") and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_transformers_is_timed_beside_ours(tiny, comparison, monkeypatch, capsys, broken):
    pytest.importorskip("transformers")
    module = comparison("compare_transformers")

    def here(command):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", command[1:])
            assert module.main() == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(module, "last_json", here)
    monkeypatch.setattr(sys, "argv", ["x", "--shape", "small", "--scale", "0.01", "--device", "cpu"])
    if broken:
        plain = module.Transformers.run
        monkeypatch.setattr(
            module.Transformers,
            "run",
            lambda self, prompts, *rest, **how: plain(self, [[1]] * len(prompts), *rest, **how),
        )
        with pytest.raises(AssertionError, match="no figure for a wrong answer"):
            module.main()
        return
    assert module.main() == 0
    assert module.asked == [(0.01, "cpu", ["dtype=float32"])]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["gate"] == ["the law", "greedy tokens of both are equal", "computed in float32"]
    assert found["ours"]["tokens"] == found["theirs"]["tokens"]
    assert found["ratio"] == pytest.approx(10.0 / found["theirs"]["value"])

"""``nanovllm profile``: what it sorts by, what it adds up, and what it refuses before anything runs."""

import ast
import gzip
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import nanovllm
import nanovllm.cli.profile
from nanovllm import LLM
from nanovllm.cli import main, rows, timing
from nanovllm.cli.classes import CLASSES, KERNELS, OPERATORS, OTHER, OURS, kernel_class, operator_class
from nanovllm.cli.profile import SETTLED_TOKENS, Part, as_parts, kernel_times, operator_times, sort_kernels, table
from nanovllm.cli.roofline import Costs, Roof
from nanovllm.cli.rows import Load
from nanovllm.config import ModelConfig

OPS = Path(nanovllm.__file__).parent / "ops"

TINY = rows.SMALL | {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(rows.SHAPES, "small", TINY)
    monkeypatch.setattr(timing, "measure_roof", lambda device, dtype: Roof(1e9, 1e10))


def profiled(capsys, *arguments, status=0):
    """Run the command; return the lines above the JSON, and the JSON."""
    assert main(["profile", "--device", "cpu", *arguments]) == status
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


# --- classes ----------------------------------------------------------------------------------------------------


def launched_kernels():
    """Functions of Triton that no other one calls: those are launched, and a profiler shows them."""
    jitted, called = set(), set()
    for path in OPS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                jitted.add(node.name)
                calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                called |= {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}
    return jitted - called


def test_every_kernel_of_ours_has_a_class_and_no_name_is_left_over():
    assert launched_kernels() == {name for names in OURS.values() for name in names}
    assert all(kernel_class(name) == known for known, names in OURS.items() for name in names)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "linear"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>", "linear"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", "linear"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>", "linear"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "compiled"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>>>", "sampling"),
        ("void at::native::index_elementwise_kernel<128, 4>", "batch"),
        ("something_new", OTHER),
    ],
)  # fmt: skip
def test_kernels_of_libraries(name, known):
    assert kernel_class(name) == known


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("quantized::linear_dynamic_fp16", "linear"), ("mkldnn::_linear_pointwise", "linear"), ("aten::mm", "linear"),
        ("aten::addmm", "linear"), ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::linalg_vector_norm", "norm"), ("aten::rsqrt_", "norm"), ("aten::silu", "activation"),
        ("aten::argmax", "sampling"), ("aten::__rshift__", "sampling"), ("aten::log_", "sampling"),
        ("aten::index_copy_", "cache"), ("aten::index", "batch"), ("aten::embedding", "batch"),
        ("aten::mul", "elementwise"), ("aten::addcmul_", "elementwise"), ("aten::view", "views"), ("mine::op", OTHER),
    ],
)  # fmt: skip
def test_operators(name, known):
    assert operator_class(name) == known


def test_every_class_has_its_place_in_the_table():
    assert {*OURS, *(known for known, _ in (*KERNELS, *OPERATORS)), OTHER} == set(CLASSES)


# --- what is added up -------------------------------------------------------------------------------------------


def test_time_that_two_kernels_share_counts_once():
    found = sort_kernels([
        (0, 10, "_decode"), (5, 12, "few_kernel"), (6, 8, "few_kernel"), (20, 30, "_join"), (30, 31, "Memset")
    ])  # fmt: skip
    assert found == {
        "attention": (pytest.approx(20e-9), 2), "linear": (pytest.approx(2e-9), 2), "copies": (pytest.approx(1e-9), 1)
    }  # fmt: skip


def test_kernels_are_what_the_device_ran():
    class Event:
        def __init__(self, kind, start, duration, name):
            self.device_type, self.start_ns, self.duration_ns = (lambda: kind), (lambda: start), (lambda: duration)
            self.name = lambda: name

    events = [
        Event("DeviceType.CPU", 0, 9, "aten::mm"), Event("DeviceType.CUDA", 3, 4, "_decode"),
        Event("DeviceType.CUDA", 9, 0, "nothing"),
    ]  # fmt: skip
    recorded = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    assert kernel_times(recorded) == {"attention": (pytest.approx(4e-9), 1)}


def test_operators_count_without_those_that_they_call():
    events = [
        SimpleNamespace(key="aten::linear", self_cpu_time_total=1e3, cpu_time_total=9e3, count=2),
        SimpleNamespace(key="aten::addmm", self_cpu_time_total=8e3, cpu_time_total=8e3, count=2),
    ]
    recorded = SimpleNamespace(key_averages=lambda: events)
    assert operator_times(recorded) == {"linear": (pytest.approx(9e-3), 4)}


def test_parts_are_those_of_one_step_and_the_rest_is_idle():
    taken = {"linear": (0.004, 20), "attention": (0.002, 4)}
    parts = as_parts(taken, 0.01, 2, {"linear": 0.001, "attention": 0.0005}, "idle")
    assert parts == [
        Part("attention", 1.0, 2.0, 0.25), Part("linear", 2.0, 10.0, 0.5), Part("idle", pytest.approx(2.0), 0.0)
    ]  # fmt: skip
    lines = table(parts, 5.0, 0.75)
    assert [line.split() for line in lines[1:]] == [
        ["attention", "1.0000", "20.0%", "0.2500", "25%", "2"], ["linear", "2.0000", "40.0%", "0.5000", "25%", "10"],
        ["idle", "2.0000", "40.0%", "-", "-"], ["all", "5.0000", "0.7500", "15%"],
    ]  # fmt: skip


HAND = ModelConfig.from_dict(TINY)
COSTS = Costs(config=HAND, num_parameters=50_000, weight_itemsize=2, cache_itemsize=2, max_num_seqs=256)


@pytest.mark.parametrize("window", [None, 4])
def test_the_floor_of_steps_is_that_of_the_bench(window):
    config = ModelConfig.from_dict(
        TINY | {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    )
    costs = Costs(config=config, num_parameters=50_000, weight_itemsize=2, cache_itemsize=2, max_num_seqs=256)
    load = Load(prompts=[[0] * 6, [0] * 9], lengths=[4, 3], shared=3)
    decodes = [[(6, 7, True), (9, 10, True)], [(7, 8, True), (10, 11, True)], [(8, 9, True)]]
    products, attention = costs.steps(decodes, shared=3)
    work = costs.decode(load)
    assert products.num_bytes + attention.num_bytes == work.num_bytes
    assert products.num_flops + attention.num_flops == work.num_flops
    apart = Load(prompts=load.prompts, lengths=[1, 1])
    prompts = [[(0, 4, False), (0, 9, True)], [(4, 6, True)]]
    products, attention = costs.steps(prompts)
    assert products.num_flops + attention.num_flops == costs.prefill(apart).num_flops
    token = 2 * 2 * 16 * 2 * 2
    assert attention.num_bytes == token * (4 + 9 + (6 if window is None else 5))


# --- the command ------------------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up(tiny, capsys, tmp_path):
    target = tmp_path / "trace.json"
    lines, found = profiled(capsys, "--row", "batch8", "--steps", "5", "--output", str(target))
    assert (found["steps"], found["requests"], found["tokens"]) == (5, 8, 8)
    assert sum(part["ms"] for part in found["parts"].values()) == pytest.approx(found["ms_per_step"])
    parts = found["parts"]
    assert parts["attention"]["calls"] == 2 and parts["linear"]["calls"] == 2 * 4 + 1, "layers, and the head"
    assert {"norm", "activation", "cache", "sampling", "between operators"} <= set(parts)
    assert OTHER not in parts
    floors = [part["floor_ms"] for part in parts.values() if part["floor_ms"] is not None]
    assert len(floors) == 2 and sum(floors) == pytest.approx(found["floor_ms_per_step"])
    printed = {line.split()[0] for line in lines if line}
    assert {"attention", "linear", "all"} <= printed and any("without the profiler" in line for line in lines)
    names = {event.get("name") for event in json.loads(target.read_text())["traceEvents"]}
    assert "aten::argmax" in names and found["trace"] == str(target)


def test_the_first_steps_compute_prompts(tiny, capsys):
    _, found = profiled(capsys, "--row", "prefill", "--steps", "1", "--scale", "0.02", "--json-only")
    load = rows.Sizes(scale=0.02).load(rows.ROWS["prefill"], 127)
    assert found["tokens"] == sum(map(len, load.prompts)) and found["requests"] == len(load.prompts)
    _, found = profiled(capsys, "--row", "batch1", "--steps", "3", "--from-start", "--json-only")
    assert found["tokens"] == (128 / 16 + 1 + 1) / 3


def test_prompts_of_ones_own_and_a_packed_trace(tiny, capsys, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(LLM, "encode", lambda self, prompt: (prompt, list(prompt.encode()), ""))
    target = tmp_path / "trace.json.gz"
    lines, found = profiled(
        capsys, "-m", str(tmp_path), "--load-format", "dummy", "-o", "skip_tokenizer_init=true", "--steps", "2",
        "--output", str(target), "Hello", "What is gravity?",
    )  # fmt: skip
    assert (found["requests"], found["tokens"], found["steps"]) == (2, 2, 2) and "2 prompts" in lines[0]
    assert json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]


def test_nothing_is_left_in_the_engine(tiny, capsys, monkeypatch):
    seen = []
    plain = nanovllm.cli.profile.walk

    def walk(llm, *arguments):
        found = plain(llm, *arguments)
        engine = llm.llm_engine
        starts = [start for step in found[1] for start, *_ in step]
        assert min(starts) == 128 // 16 + SETTLED_TOKENS - 1, "every request has its first tokens"
        seen.append((engine.has_unfinished_requests, len(engine.observers), engine.scheduler.blocks.num_held))
        return found

    monkeypatch.setattr(nanovllm.cli.profile, "walk", walk)
    profiled(capsys, "--steps", "2")
    assert seen == [(False, 1, 0)] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "missing/folder/t.json"], "there is no folder missing/folder"),
        (["--output", "t.txt"], "must end in .json or .json.gz"),
        (["--output", "taken.json"], "this is a folder"),
        (["--row", "batch9"], "no row 'batch9'. Did you mean"),
        (["--row", "big"], "--row is 'big'; it must be one row"),
        (["--row", "start"], "--row is 'start'; it must be one row"),
        (["-o", "bloc_size=16"], "Did you mean 'block_size'?"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(tiny, capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").mkdir()
    monkeypatch.setattr(nanovllm.cli.profile, "Session", lambda *_: pytest.fail("something has run"))
    assert main(["profile", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_work_that_does_not_fit_is_no_profile(tiny, capsys):
    assert main(["profile", "--device", "cpu", "-o", "max_model_len=8", "--steps", "2", "--row", "batch1"]) == 2
    assert "max_model_len" in capsys.readouterr().err


def test_the_pages_commands_can_be_given(monkeypatch):
    page = (Path(nanovllm.__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    commands = [line.strip() for line in page.splitlines() if line.startswith("    nanovllm profile")]
    asked = []
    monkeypatch.setattr(nanovllm.cli.profile, "run", lambda args: asked.append(args) or 0)
    assert [main(shlex.split(command)[1:]) for command in commands] == [0] * 4
    assert all(args.row in rows.ROWS for args in asked)


@pytest.mark.gpu
def test_on_a_gpu_kernels_in_graphs_have_their_names(capsys):
    assert main(["profile", "--row", "batch8", "--steps", "8", "--json-only"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = found["parts"]
    assert {"attention", "linear", "sampling", "idle"} <= set(parts)
    assert parts.get(OTHER, {"ms": 0.0})["ms"] < 0.05 * found["ms_per_step"]
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(found["ms_per_step"], rel=0.01)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_that_is_not_written_is_said(tiny, capsys, tmp_path, monkeypatch, name):
    """PyTorch logs it and goes on when a disk is full, but while it compresses raises; both leave a part behind."""

    def export(recorded, path):
        if path.endswith(".gz"):
            Path(path).write_text("a part")
            raise OSError(28, "No space left on device")
        Path(f"{path}.tmp").write_text("a part")

    monkeypatch.setattr(nanovllm.cli.profile.profile, "export_chrome_trace", export)
    assert main(["profile", "--device", "cpu", "--steps", "2", "--output", str(tmp_path / name)]) == 1
    out, err = capsys.readouterr()
    assert f"{name} has not been written" in err and "trace written" not in out
    assert json.loads(out.splitlines()[-1])["trace"] is None and not list(tmp_path.iterdir())

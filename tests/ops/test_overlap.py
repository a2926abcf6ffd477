"""Kernels that start early: who must not."""

import ast
from pathlib import Path

import torch

import nanovllm
from nanovllm.ops.overlap import launch_options

OPS = Path(nanovllm.__file__).parent / "ops"


def test_nothing_starts_early_on_a_cpu():
    assert launch_options(torch.ones(1)) == {"WAITS": 0}


def test_the_first_two_kernels_of_a_recorded_step_are_barriers():
    """Those that follow read what the first has received before they wait for those in front of them."""
    graphs = ast.parse((OPS.parent / "cuda_graphs.py").read_text(encoding="utf-8"))
    (step,) = [node for node in ast.walk(graphs) if isinstance(node, ast.FunctionDef) and node.name == "step"]
    calls = [node.func.id for node in ast.walk(step) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert calls.index("receive") == 0 and "take_tokens" in calls
    batch = next(node for node in ast.walk(step) if isinstance(node, ast.Call) and node.func.id == "Batch")
    assert batch.keywords[0].arg == "token_ids" and batch.keywords[0].value.func.id == "take_tokens"
    assert "overlap import" not in (OPS / "take_tokens" / "kernel.py").read_text(encoding="utf-8")
    exchange = ast.parse((OPS / "exchange" / "kernel.py").read_text(encoding="utf-8"))
    (receive,) = [node for node in exchange.body if isinstance(node, ast.FunctionDef) and node.name == "receive"]
    assert "launch_options" not in ast.dump(receive)

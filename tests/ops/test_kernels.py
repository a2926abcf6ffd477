"""The choice between a kernel and its reference."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from nanovllm.ops import activation, kernels, rms_norm, rotary, rotate_and_store, sample, store_kvcache
from nanovllm.ops.kernels import TRITON, kernels_run_on


def test_tensors_on_a_cpu_take_the_reference():
    assert not kernels_run_on(torch.zeros(2, 3))


@pytest.mark.parametrize(("capability", "able"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_too_old_for_the_kernels_takes_the_references(capability, able, monkeypatch):
    """Compute capability 7.5 has float16 and 64 KiB of shared memory, of which products of few rows take more."""
    kernels._able.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "TRITON", True)
    there = SimpleNamespace(is_cuda=True, dtype=torch.float16, get_device=lambda: 0, stride=lambda dim: 1)
    assert kernels_run_on(there) is kernels_run_on(there, there) is able
    kernels._able.cache_clear()


def test_front_doors_do_not_import_triton():
    doors = ("activation", "rms_norm", "rotary", "rotate_and_store", "sample", "store_kvcache")
    names = ", ".join(f"nanovllm.ops.{op}" for op in doors)
    code = f"import sys, {names}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not TRITON, reason="needs Triton")
def test_on_a_gpu_the_front_doors_take_the_kernels(monkeypatch):
    x = torch.randn(2, 3, 8, device="cuda")
    norm, angles, slots = torch.ones(8, device="cuda"), torch.ones(2, 1, 8, device="cuda"), torch.arange(2).cuda()
    norms = (norm, norm, 1e-6)
    calls = [
        (rms_norm, "rms_norm", (x, norm, 1e-6)),
        (rms_norm, "add_rms_norm", (x[:, 0], x[:, 1], norm, 1e-6)),
        (rotary, "rotate", (x, angles, angles)),
        (activation, "gate_times_up", (x[:, 0], "silu")),
        (store_kvcache, "store_kvcache", (x, x, x.clone(), x.clone(), slots)),
        (rotate_and_store, "rotate_and_store", (x, norms, angles, angles, *x.clone().view(2, 3, 1, 8), slots)),
        (sample, "greedy", (x[:, 0],)),
        (sample, "draw", (x[:, 0], slots, slots)),
    ]
    for door, name, arguments in calls:
        monkeypatch.setattr(door.reference, name, None)
        getattr(door, name)(*arguments)
    assert not kernels_run_on(x.double()) and not kernels_run_on(x, norm.half())
    assert not kernels_run_on(x.transpose(1, 2))

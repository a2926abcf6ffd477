"""Rows of a table, whatever their number, width and order."""

from importlib import import_module

import pytest
import torch

from nanovllm.ops.kernels import TRITON
from nanovllm.ops.look_up import look_up, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_kernel(table, indices):
    return import_module("nanovllm.ops.look_up.kernel").look_up(table, indices)


needs_triton = pytest.mark.skipif(not TRITON, reason="needs triton")


@pytest.mark.parametrize("run", [reference.look_up, pytest.param(by_kernel, marks=needs_triton), look_up])
@pytest.mark.parametrize("shape", [(1, 7), (37, 64), (20, 2, 48), (5, 4097), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_row_is_its_entry(run, shape, dtype):
    table = torch.randn(shape, device=DEVICE).to(dtype)
    for rows in (0, 1, 19):
        indices = torch.randint(0, shape[0], (rows,), device=DEVICE)
        found = run(table, indices)
        assert found.shape == (rows, *shape[1:])
        assert torch.equal(found, torch.stack([table[i] for i in indices.tolist()]) if rows else table[:0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_beyond_two_to_the_31(dtype):
    table = torch.zeros(2**31 // 1024 + 2, 1024, device=DEVICE, dtype=dtype)
    table[-1] = 5
    last = torch.tensor([len(table) - 1, 0], device=DEVICE)
    assert look_up(table, last).sum(1).tolist() == [5 * 1024, 0]

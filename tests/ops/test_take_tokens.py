"""Known ids stay, rows of the last step's draw are looked up."""

from importlib import import_module

import pytest
import torch

from nanovllm.ops.kernels import TRITON
from nanovllm.ops.take_tokens import reference, take_tokens


def by_kernel(sources, drawn):
    return import_module("nanovllm.ops.take_tokens.kernel").take_tokens(sources, drawn)


needs_triton = pytest.mark.skipif(not TRITON, reason="needs triton")


@pytest.mark.parametrize("run", [reference.take_tokens, pytest.param(by_kernel, marks=needs_triton), take_tokens])
@pytest.mark.parametrize("tokens", [0, 1, 5, 1023, 2050])
def test_sources_are_resolved(run, tokens):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = torch.randint(0, 1 << 40, (37,), device=device)
    sources = torch.randint(-37, 1 << 40, (tokens,), device=device)
    sources[::2] = torch.randint(-37, 0, (len(sources[::2]),), device=device)
    found = run(sources, drawn)
    expected = [source if source >= 0 else int(drawn[-1 - source]) for source in sources.tolist()]
    assert found.tolist() == expected


def test_nobody_looks_behind_the_rows_for_a_known_id():
    assert take_tokens(torch.tensor([3, 0]), torch.tensor([], dtype=torch.int64).new_zeros(1)).tolist() == [3, 0]


@pytest.mark.parametrize("run", [reference.take_tokens, pytest.param(by_kernel, marks=needs_triton)])
def test_what_could_not_be_drawn_is_an_id_all_the_same(run):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drawn = torch.tensor([5, -1], device=device)
    assert run(torch.tensor([-1, -2, 7], device=device), drawn).tolist() == [5, 0, 7]

"""Packed masks: what has no bit becomes -inf, in the rows that are named and nowhere else."""

from importlib import import_module

import pytest
import torch

from nanovllm.ops.kernels import TRITON
from nanovllm.ops.mask import mask_logits, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_kernel(logits, rows, words):
    import_module("nanovllm.ops.mask.kernel").mask_logits(logits, rows, words)


needs_triton = pytest.mark.skipif(not TRITON, reason="needs triton")
each_way = pytest.mark.parametrize(
    "run", [reference.mask_logits, pytest.param(by_kernel, marks=needs_triton), mask_logits]
)


def expected(logits, rows, words):
    """The meaning, number by number."""
    result = logits.clone()
    for row, line in zip(rows.tolist(), words.tolist(), strict=True):
        for token in range(logits.shape[1]):
            bit = token < 32 * len(line) and line[token // 32] >> (token % 32) & 1
            result[row, token] = logits[row, token] if bit else -torch.inf
    return result


def draw(rows, vocab, width, dtype=torch.float32):
    words = torch.randint(-(2**31), 2**31, (len(rows), width), device=DEVICE).to(torch.int32)
    logits = torch.randn(max(rows, default=0) + 2, vocab, device=DEVICE).to(dtype)
    return logits, torch.tensor(rows, dtype=torch.int64, device=DEVICE), words


@each_way
@pytest.mark.parametrize("rows", [[], [0], [3, 1], [0, 1, 2]])
@pytest.mark.parametrize(
    ("vocab", "width"), [(1, 1), (31, 1), (32, 1), (33, 2), (259, 9), (259, 8), (259, 3), (70, 12), (4097, 129)]
)
def test_what_has_no_bit_is_forbidden(run, rows, vocab, width):
    logits, named, words = draw(rows, vocab, width)
    wanted = expected(logits, named, words)
    run(logits, named, words)
    assert torch.equal(logits, wanted)


@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_stay_are_the_same_bits(run, dtype):
    logits, named, words = draw([1, 2], 100, 4, dtype)
    logits[1, 7], words[0, 0] = -0.0, -1
    before = logits.clone()
    run(logits, named, words)
    stays = ~torch.isneginf(logits)
    assert torch.equal(logits[stays].view(torch.uint8), before[stays].view(torch.uint8))
    assert torch.equal(logits[[0, 3]], before[[0, 3]])


@each_way
def test_rows_and_masks_may_lie_apart_and_their_neighbours_stay(run):
    wide = torch.full((4, 90), torch.nan, device=DEVICE)
    logits, words = wide[:, :70], torch.zeros(3, 8, dtype=torch.int32, device=DEVICE)[:, :3]
    logits[:] = 1.0
    words[1, 2] = 1 << 5
    run(logits, torch.tensor([0, 2, 3], device=DEVICE), words)
    assert torch.isnan(wide[:, 70:]).all()
    assert (logits[1] == 1.0).all() and logits[2].isfinite().nonzero().tolist() == [[69]]
    assert torch.isneginf(logits[[0, 3]]).all()

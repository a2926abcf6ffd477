"""Penalties in place, a program for each row that has any: the others are not looked at.

A program goes through its row's words, a block at a time, and watches for the pending token among them. If it was not
there, it is one word more. Words of a row name each token once, so no two lanes write one logit.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED

BLOCK = 1024


@triton.jit
def penalized(x, count, repetition, frequency, presence):
    """Return logits, as float32, with what their counts cost them."""
    x = tl.where(x > 0, x / repetition, x * repetition)
    return x - frequency * count - tl.where(count > 0, presence, 0.0)


@triton.jit(do_not_specialize_on_alignment=["rows", "words", "edges", "pending", "strengths"])
def penalize_kernel(
    logits, rows, words, edges, pending, strengths, vocab, logits_row, number, BLOCK: tl.constexpr
):  # fmt: skip
    """Change one row."""
    place = tl.program_id(0)
    repetition = tl.load(strengths + place)
    frequency = tl.load(strengths + number + place)
    presence = tl.load(strengths + 2 * number + place)
    logits += tl.load(rows + place) * logits_row  # int64: row * vocab passes 2**31
    extra = tl.load(pending + place)
    end = tl.load(edges + place + 1).to(tl.int32)
    found = 0
    for first in range(tl.load(edges + place).to(tl.int32), end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        word = tl.load(words + at, inside, -1)
        token = word & 0xFFFFFFFF
        same = (token == extra) & inside
        found += tl.sum(same.to(tl.int32), 0)
        count = ((word >> 32) + same.to(tl.int64)).to(tl.float32)
        x = tl.load(logits + token, inside, 0.0).to(tl.float32)
        x = penalized(x, count, repetition, frequency, presence)
        tl.store(logits + token, x.to(logits.dtype.element_ty), inside)
    if (found == 0) & (extra < vocab):
        x = penalized(tl.load(logits + extra).to(tl.float32), 1.0, repetition, frequency, presence)
        tl.store(logits + extra, x.to(logits.dtype.element_ty))


def penalize(logits: Tensor, rows: Tensor, words: Tensor, edges: Tensor, pending: Tensor, strengths: Tensor) -> None:
    """See ``reference.penalize``."""
    if len(rows):
        penalize_kernel[(len(rows),)](
            logits, rows, words, edges, pending, strengths, logits.shape[1], logits.stride(0), len(rows),
            BLOCK=BLOCK, num_warps=4, **FUSED,
        )  # fmt: skip

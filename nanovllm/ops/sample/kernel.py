"""Greedy choice and Gumbel-max draws in one pass over the logits.

A row is cut into chunks, a program each; a second, small kernel takes the best of a row's chunks. The noise is made
where it is used and never stored:

    logits of a row   [ chunk 0 | chunk 1 | chunk 2 ]
    best of each      [ 3.1, 17 | 9.2, 70 | 2.5, 99 ]   score, token
    best of all                   70

Scores equal the reference's up to the rounding of two logarithms, so a draw differs from it only where the two best
scores nearly tie; it is the same however a row is cut.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED


@triton.jit
def mix(x):
    """``reference._mix`` on uint32 words, whose shifts fill with zeros as they are."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def natural_log(x, FAST: tl.constexpr):
    """``FAST``: the chip's own base-2 logarithm, off by 2**-22 of itself, and near 1 by 2**-22 (PTX ISA, lg2.approx).

    The exact one takes some 20 instructions, and two for each of 256 x 151,936 tokens outlast the reading of them.
    """
    if FAST:
        log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
        return log2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def gumbel(seed, position, token, FAST: tl.constexpr):
    """``reference.gumbel`` for int64 scalars ``seed`` and ``position`` and a block of int32 tokens."""
    key = seed.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key ^= key >> 31
    word = token.to(tl.uint32, bitcast=True) * 0x9E3779B9 + key.to(tl.uint32)
    word = mix(mix(word) ^ (key >> 32).to(tl.uint32))
    uniform = (word.to(tl.int32, bitcast=True).to(tl.float32) + 2147483648.0) * 2.3283064365386963e-10  # 2**31, 2**-32
    uniform = tl.minimum(tl.maximum(uniform, 1.1641532182693481e-10), 0.99999994)  # 2**-33, 1 - 2**-24
    # -log(1 - u): by its series where the difference from 1 would round off the digits of u; the first term that
    # is left out is u**6 / 7, 8e-9 of the whole at 1/16
    series = 0.25 + uniform * (0.2 + uniform * (1 / 6))
    series = uniform * (1 + uniform * (0.5 + uniform * (1 / 3 + uniform * series)))
    return -natural_log(tl.where(uniform < 0.0625, series, -natural_log(1 - uniform, FAST)), FAST)


@triton.jit
def best_of_chunk_kernel(
    logits, seeds, positions, best_scores, best_tokens, vocab, logits_row, chunks,
    NOISE: tl.constexpr, FAST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the best score of one chunk of a row, and the lowest token that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: row * vocab passes 2**31
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(logits + row * logits_row + token, token < vocab, -float("inf")).to(tl.float32)
    if NOISE:
        score += gumbel(tl.load(seeds + row), tl.load(positions + row), token, FAST)
    score = tl.where(score == score, score, float("inf"))  # NaN is the maximum, as it is for argmax
    best = tl.max(score, 0)
    first = tl.min(tl.where(score == best, token, 2147483647), 0)  # the padding's tokens are larger than all others
    tl.store(best_scores + row * chunks + chunk, best)
    tl.store(best_tokens + row * chunks + chunk, first)


@triton.jit
def best_of_row_kernel(best_scores, best_tokens, out, chunks, BLOCK: tl.constexpr):
    """Find the best of one row's chunks."""
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    score = tl.load(best_scores + row * chunks + chunk, chunk < chunks, -float("inf"))
    token = tl.load(best_tokens + row * chunks + chunk, chunk < chunks, 2147483647)
    best = tl.max(score, 0)
    tl.store(out + row, tl.min(tl.where(score == best, token, 2147483647), 0).to(tl.int64))


def greedy(logits: Tensor) -> Tensor:
    """See ``reference.greedy``."""
    return _best(logits, logits, logits, noise=False)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See ``reference.draw``."""
    return _best(logits, seeds, positions, noise=True)


def _best(logits: Tensor, seeds: Tensor, positions: Tensor, noise: bool) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    chunk = 4096 if rows >= 8 else 1024  # few rows: more programs, or most of the chip has nothing to do
    chunks = triton.cdiv(vocab, chunk)
    scores = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    best_of_chunk_kernel[(rows, chunks)](
        logits, seeds, positions, scores, tokens, vocab, logits.stride(0), chunks,
        NOISE=noise, FAST=logits.is_cuda and torch.version.hip is None, CHUNK=chunk, num_warps=chunk // 512,
        **FUSED,
    )  # fmt: skip
    best_of_row_kernel[(rows,)](scores, tokens, out, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, **FUSED)
    return out

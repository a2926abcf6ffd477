"""Choosing tokens without a sort, without a copy of the logits, and without a word from the host.

Draws. A row is cut into chunks, a program each; a second, small kernel takes the best of a row's chunks. The noise is
made where it is used and never stored:

    logits of a row   [ chunk 0 | chunk 1 | chunk 2 ]
    best of each      [ 3.1, 17 | 9.2, 70 | 2.5, 99 ]   score, token
    best of all                   70

Scores equal the reference's up to the rounding of two logarithms and of a division, so a draw differs from it only
where the two best scores nearly tie; it is the same however a row is cut.

Filtered draws. The draw is the best score among the kept tokens. So first draw among all: if that token is kept, it is
the draw. To know takes one more pass over the logits, and with top_p 0.95 it is so for some 95 rows in 100. Only the
others are searched for their line and drawn anew: they are listed on the device, and programs work their way through
the list, so that a pass costs little more than its launch where nearly all rows are settled.

    draw among all | is it kept? | list the rest | search ... search | draw among the kept
    every row        filtered rows  one program    rows of the list    rows of the list

Filters. A token stays if the tokens with larger logits weigh less than a target: each weighs 1 and the target is top_k,
or each weighs its probability and the target is a share top_p of the whole. The weight above x falls as x grows, so the
line is found by bisection, each pass with several pivots. Floats are numbered in their order (``key_of``), so that it
ends exactly: the line lies in (lo, hi], where the weight above lo reaches the target and that above hi does not.

    keys             lo . . . . p1 . . . . p2 . . . . p3 . . . . hi
    weight above     9          7          4          1          0      target 5: the line is in (p1, p2]

The first draw, which sees all logits, notes the largest of each thousand: no top_k line lies below the top_k-th largest
of those, which leaves a few passes of ten. And only where one of those is kept need the second draw look at all.

The first passes space their pivots by value, for tokens lie evenly there; the others by key, which ends in a bounded
number. Top-k comes first and leaves its lo to top-p. The kept tokens are those of the reference, but where a weight
comes within the rounding of its sums of the target. Sums are made in one order, by chunks, however many rows there are,
and the result does not depend on the pivots: no row changes another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED

CHUNK = tl.constexpr(8192)
"""Logits whose weights are added up before they meet others: 32 for each thread."""
WARPS = 8
FINE = tl.constexpr(1024)
"""Logits whose largest and smallest are noted by the first draw."""
FEW_ROWS = 16
"""Under this, passes wait for each other rather than for their work: fewer of them, with more pivots in each."""
FEW, MANY = (16, 1, 6), (4, 3, 10)
"""Pivots of a pass, passes that space them by value, and passes planned; the last twice for logits of 32 bits."""
TAIL = tl.constexpr(4)
"""Pivots of the passes that a row may lack when the planned ones are over."""
MOST_PROGRAMS = 512
"""Programs that work through a list of rows: they keep the memory busy, and soon find that a list is empty."""
DONE, BY_SUMS, SEARCHED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What is to be done about a row's first draw: nothing, to see what lies above it, to look for the row's line."""

SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Last bits of a float32 that a type lacks."""

SETTINGS = ["temperatures", "top_k", "top_p", "min_p", "lowest", "seeds", "positions", "tokens", "listed"]
"""One number for each row: they may lie anywhere, and nothing should be compiled anew for where they lie."""

STATE = tl.constexpr(8)
"""32-bit words of a row's state, before its pivots: lo, hi, whether tokens weigh their probability, passes made with
that weight, target, largest logit; two are spare."""


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
def best_of(
    row, token, logits, temperatures, lowest, seeds, positions, vocab, logits_row,
    NOISE: tl.constexpr, SCALED: tl.constexpr, FILTERED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return a row's logits at some tokens, the best score of them, and the lowest token that has it."""
    x = tl.load(logits + row * logits_row + token, token < vocab, -float("inf")).to(tl.float32)
    score = x
    if NOISE:
        temperature = tl.load(temperatures + row) if SCALED else 1.0
        if temperature > 0:
            noisy = score * (1.0 / temperature) + gumbel(tl.load(seeds + row), tl.load(positions + row), token, FAST)
            if FILTERED:
                noisy = tl.where(score < tl.load(lowest + row), -float("inf"), noisy)  # NaN stays
            score = noisy
    token = tl.where(score == score, token, -1)  # NaN beats all others, and is no token
    score = tl.where(score == score, score, float("inf"))
    best = tl.max(score, 0)
    # the padding's tokens are larger than all others
    return x, best, tl.min(tl.where(score == best, token, 2147483647), 0)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def best_of_chunk_kernel(
    logits, temperatures, lowest, seeds, positions, best_scores, best_tokens, extremes, listed, count,
    vocab, logits_row, chunks, fines,
    NOISE: tl.constexpr, SCALED: tl.constexpr, LISTED: tl.constexpr, EXTREMES: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best score of each chunk of each row, and its token. A program is for one; or, ``LISTED``, for some
    chunks of the rows of a list, and looks where the extremes say that something is kept.

    ``EXTREMES``: also the largest logit of every ``FINE``, or inf if one is NaN, and the smallest but for -inf.
    """
    PARTS: tl.constexpr = BLOCK // FINE
    if LISTED:
        for item in range(tl.program_id(0), tl.load(count) * chunks, tl.num_programs(0)):
            row, chunk = tl.load(listed + item // chunks).to(tl.int64), item % chunks
            line = tl.load(lowest + row)
            top, first = -float("inf"), 2147483647
            for index in tl.static_range(PARTS):
                part = chunk * PARTS + index
                largest = tl.load(extremes + 2 * (row * fines + part), part < fines, -float("inf"))
                if (part < fines) & ~(largest < line):
                    _, best, token = best_of(
                        row, part * FINE + tl.arange(0, FINE), logits, temperatures, lowest, seeds, positions,
                        vocab, logits_row, NOISE, SCALED, True, FAST,
                    )  # fmt: skip
                    first = tl.where(best > top, token, first)
                    top = tl.maximum(best, top)
            tl.store(best_scores + row * chunks + chunk, top)
            tl.store(best_tokens + row * chunks + chunk, first)
    else:
        row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: row * vocab passes 2**31
        x, best, first = best_of(
            row, chunk * BLOCK + tl.arange(0, BLOCK), logits, temperatures, lowest, seeds, positions,
            vocab, logits_row, NOISE, SCALED, False, FAST,
        )  # fmt: skip
        tl.store(best_scores + row * chunks + chunk, best)
        tl.store(best_tokens + row * chunks + chunk, first)
        if EXTREMES:
            part = chunk * PARTS + tl.arange(0, PARTS)
            at = extremes + 2 * (row * fines + part)
            tops = tl.reshape(tl.where(x == x, x, float("inf")), (PARTS, FINE))
            leasts = tl.reshape(tl.where(x > -float("inf"), x, float("inf")), (PARTS, FINE))
            tl.store(at, tl.max(tops, 1), part < fines)
            tl.store(at + 1, tl.min(leasts, 1), part < fines)


@triton.jit
def key_of(x):
    """Number a float32 in the order of floats: its magnitude's bits, with its sign. Both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def best_of_row_kernel(
    best_scores, best_tokens, out, listed, count, extremes, top_k, ranges, chunks, fines,
    LISTED: tl.constexpr, EXTREMES: tl.constexpr, SHIFT: tl.constexpr, FINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best of one row's chunks. ``EXTREMES``: also the keys between which the row's line may lie, ``ranges``.

    Of all largest logits of a part, top_k are not below the top_k-th: so the row's line is not below it either.
    """
    row = tl.program_id(0)
    number = row + 1
    if LISTED:
        number = tl.load(count)
    if row < number:
        if LISTED:
            row = tl.load(listed + row)
        chunk = tl.arange(0, BLOCK)
        score = tl.load(best_scores + row * chunks + chunk, chunk < chunks, -float("inf"))
        token = tl.load(best_tokens + row * chunks + chunk, chunk < chunks, 2147483647)
        best = tl.max(score, 0)
        found = (not LISTED) | (best > -float("inf"))  # nothing is kept of a row of -inf alone: its first draw stays
        tl.store(out + row, tl.min(tl.where(score == best, token, 2147483647), 0).to(tl.int64), found)
        if EXTREMES:
            part = tl.arange(0, FINES)
            at = extremes + 2 * (row * fines + part)
            tops = tl.load(at, part < fines, -float("inf"))
            least = tl.min(tl.load(at + 1, part < fines, float("inf")), 0)
            keys = (key_of(tops) >> SHIFT).to(tl.int64)
            lo = (key_of(least) >> SHIFT).to(tl.int64)
            beyond = (key_of(tl.max(tops, 0)) >> SHIFT).to(tl.int64) + 1
            tl.store(ranges + 2 * row + 1, (beyond - 1).to(tl.int32))
            k = tl.load(top_k + row)
            if (k > 0) & (k <= fines):
                while beyond - lo > 1:  # as many are not below lo, and not as many not below what lies beyond
                    middle = (lo + beyond) // 2
                    enough = tl.sum((keys >= middle).to(tl.int32), 0) >= k
                    lo = tl.where(enough, middle, lo)
                    beyond = tl.where(enough, beyond, middle)
            tl.store(ranges + 2 * row, (lo - 1).to(tl.int32))


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Return the float of a key without its last ``SHIFT`` bits, those that the logits' type lacks."""
    bits = tl.where(key < 0, -key, key).to(tl.int32) << SHIFT
    return (bits | tl.where(key < 0, -2147483648, 0)).to(tl.float32, bitcast=True)


@triton.jit
def pivot(lo, hi, number, by_value, SHIFT: tl.constexpr, PIVOTS: tl.constexpr):
    """Return the key of one of ``PIVOTS`` that cut [lo, hi) evenly, the first of them lo."""
    key = lo + ((hi - lo) * number) // PIVOTS
    if by_value:
        share = number / PIVOTS
        # fused by name: it is made twice, for the sums and for the next pass, and must come out equal
        value = tl.fma(value_of(hi, SHIFT), share, value_of(lo, SHIFT) * (1 - share))
        key = tl.minimum(tl.maximum((key_of(value) >> SHIFT).to(tl.int64), lo), hi - 1)
        if number == 0:
            key = lo
    return key


@triton.jit
def opened(ranges, temperature, top_k, top_p, min_p, vocab, SHIFT: tl.constexpr):
    """Return a row's first state: everything in its range, or down to its min_p."""
    lo, hi = tl.load(ranges).to(tl.int64), tl.load(ranges + 1).to(tl.int64)
    top = value_of(hi, SHIFT)
    if min_p > 0:
        line = key_of(top + temperature * tl.log(min_p)).to(tl.int64)
        lo = tl.maximum(lo, -(-line >> SHIFT) - 1)  # rounded up: the line itself may not be a number of the type
    by_count = (top_k > 0) & (top_k < vocab)
    weighs = tl.where(by_count, 0, 1)
    if (not by_count) & (top_p >= 1):
        hi = lo  # nothing to look for
    return lo, hi, weighs, 0, top_k.to(tl.float32), top


@triton.jit
def narrowed(state, sums, top_p, chunks, SHIFT: tl.constexpr, PIVOTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return a row's state after the pass whose pivots and sums are given."""
    lo, hi = tl.load(state).to(tl.int64), tl.load(state + 1).to(tl.int64)
    weighs, turn = tl.load(state + 2), tl.load(state + 3)
    target = tl.load(state + 4).to(tl.float32, bitcast=True)
    top = tl.load(state + 5).to(tl.float32, bitcast=True)
    if hi - lo > 1:
        number = tl.arange(0, PIVOTS)
        pivots = tl.load(state + STATE + number).to(tl.int64)
        above = tl.zeros([PIVOTS], tl.float32)
        for chunk in tl.static_range(CHUNKS):  # one after the other: a reduction's order would depend on PIVOTS
            at = chunk * PIVOTS + number
            above += tl.load(sums + at, at < chunks * PIVOTS, 0.0)
        if (weighs == 1) & (turn == 0):
            target = top_p * tl.sum(tl.where(number == 0, above, 0.0), 0)  # what lies above lo is the whole
        enough = above >= target
        new_lo = tl.max(tl.where(enough, pivots, lo), 0)
        hi = tl.min(tl.where(enough, hi, pivots), 0)
        lo = new_lo
        turn += 1
        if (hi - lo <= 1) & (weighs == 0) & (top_p < 1):
            hi = (key_of(top) >> SHIFT).to(tl.int64)
            weighs += 1
            turn *= 0
    return lo, hi, weighs, turn, target, top


@triton.jit
def remember(state, lo, hi, weighs, turn, target, top):
    """Store a row's state."""
    tl.store(state, lo.to(tl.int32))
    tl.store(state + 1, hi.to(tl.int32))
    tl.store(state + 2, weighs)
    tl.store(state + 3, turn)
    tl.store(state + 4, target.to(tl.int32, bitcast=True))
    tl.store(state + 5, top.to(tl.int32, bitcast=True))


@triton.jit
def weights(row_logits, chunk, vocab, temperature, weighs, top):
    """Load one chunk of a row; return its logits and what each weighs."""
    scale = 1.4426950408889634 / temperature
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row_logits + token, token < vocab, -float("inf")).to(tl.float32)
    weight = tl.full([CHUNK], 1.0, tl.float32)
    if weighs == 1:
        weight = tl.exp2(tl.fma(x, scale, -top * scale))
    return x, weight


@triton.jit
def add_weights(
    row_logits, sums, temperature, lo, hi, weighs, turn, top, vocab, first, step, chunks,
    SHIFT: tl.constexpr, PIVOTS: tl.constexpr, BY_VALUE: tl.constexpr,
):  # fmt: skip
    """Add up what lies above each pivot, in every ``step``-th chunk of a row."""
    for chunk in range(first, chunks, step):
        x, weight = weights(row_logits, chunk, vocab, temperature, weighs, top)
        for number in tl.static_range(PIVOTS):
            line = value_of(pivot(lo, hi, number, turn < BY_VALUE, SHIFT, PIVOTS), SHIFT)
            tl.store(sums + chunk * PIVOTS + number, tl.sum((x > line).to(tl.float32) * weight, 0))


@triton.jit
def filters(temperature, top_k, top_p, min_p, vocab):
    """Whether a row's filters keep less than everything."""
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0))


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def check_kernel(
    logits, temperatures, top_k, top_p, min_p, tokens, ranges, verdicts, sums, vocab, logits_row, chunks,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Add up one chunk's weights above a row's least kept by min_p, and above its drawn token.

    They are made as ``add_weights`` makes them: that pass, with the drawn token as a pivot, would find the same.
    """
    row, chunk, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    temperature, k = tl.load(temperatures + row), tl.load(top_k + row)
    share, least = tl.load(top_p + row), tl.load(min_p + row)
    verdict = 0
    if filters(temperature, k, share, least, vocab):
        by_count = (k > 0) & (k < vocab)
        lo, _, weighs, _, _, top = opened(ranges + row * 2, temperature, k, share, least, vocab, SHIFT)
        token = tl.load(tokens + row)
        drawn = tl.load(logits + row * logits_row + token, token >= 0, 0.0).to(tl.float32)
        if token < 0:
            verdict = DONE  # a row with NaN is not searched
        elif ((key_of(drawn) >> SHIFT).to(tl.int64) <= lo) | (by_count & (share < 1)):
            verdict = SEARCHED  # what top_p means of what top_k keeps, nobody knows before that is found
        elif by_count | (share < 1):
            verdict = BY_SUMS
            x, weight = weights(logits + row * logits_row, chunk, vocab, temperature, weighs, top)
            at = sums + chunk * 2 * rows + row
            tl.store(at, tl.sum((x > value_of(lo, SHIFT)).to(tl.float32) * weight, 0))
            tl.store(at + rows, tl.sum((x > drawn).to(tl.float32) * weight, 0))
    if chunk == 0:
        tl.store(verdicts + row, verdict)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def list_kernel(
    top_k, top_p, verdicts, sums, listed, count, vocab, rows, ROWS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """List the rows whose drawn token is not kept or not known to be. One program; sums are made as in ``narrowed``."""
    row = tl.arange(0, ROWS)
    verdict = tl.load(verdicts + row, row < rows, DONE)
    by_sums = verdict == BY_SUMS
    whole = tl.zeros([ROWS], tl.float32)
    above = tl.zeros([ROWS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = sums + chunk * 2 * rows + row
        whole += tl.load(at, by_sums, 0.0)
        above += tl.load(at + rows, by_sums, 0.0)
    k = tl.load(top_k + row, by_sums, 0)
    target = tl.where((k > 0) & (k < vocab), k.to(tl.float32), tl.load(top_p + row, by_sums, 0.0) * whole)
    open_rows = ((verdict == SEARCHED) | (by_sums & ~(above < target))).to(tl.int32)  # sums with NaN settle nothing
    tl.store(listed + tl.cumsum(open_rows, 0) - 1, row, open_rows == 1)
    tl.store(count, tl.sum(open_rows, 0))


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def search_kernel(
    logits, temperatures, top_k, top_p, min_p, ranges, listed, count, state, new_state, sums, new_sums,
    vocab, logits_row, chunks,
    FIRST: tl.constexpr, SHIFT: tl.constexpr, PIVOTS: tl.constexpr, BY_VALUE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Make one pass over the listed rows: who works at a row settles its last pass anew, then adds up some chunks."""
    words: tl.constexpr = STATE + PIVOTS
    number_of_rows, programs = tl.load(count), tl.num_programs(0)
    step = chunks  # a chunk for each program, or some for each, who then settle the last pass less often
    if number_of_rows * chunks > programs:
        step = tl.minimum(chunks, 4)
    for item in range(tl.program_id(0), number_of_rows * step, programs):
        row, first = tl.load(listed + item // step).to(tl.int64), item % step
        temperature, share = tl.load(temperatures + row), tl.load(top_p + row)
        if FIRST:
            lo, hi, weighs, turn, target, top = opened(
                ranges + row * 2, temperature, tl.load(top_k + row), share, tl.load(min_p + row), vocab, SHIFT
            )
        else:
            lo, hi, weighs, turn, target, top = narrowed(
                state + row * words, sums + row * chunks * PIVOTS, share, chunks, SHIFT, PIVOTS, CHUNKS
            )
        if first == 0:
            remember(new_state + row * words, lo, hi, weighs, turn, target, top)
        if hi - lo > 1:
            if first == 0:
                for number in tl.static_range(PIVOTS):
                    key = pivot(lo, hi, number, turn < BY_VALUE, SHIFT, PIVOTS)
                    tl.store(new_state + row * words + STATE + number, key.to(tl.int32))
            add_weights(
                logits + row * logits_row, new_sums + row * chunks * PIVOTS, temperature, lo, hi, weighs, turn, top,
                vocab, first, step, chunks, SHIFT, PIVOTS, BY_VALUE,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def settle_kernel(
    logits, temperatures, top_p, listed, count, state, sums, lowest, vocab, logits_row, chunks,
    SHIFT: tl.constexpr, PIVOTS: tl.constexpr, BY_VALUE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Settle the last pass, make those that a row still lacks (few do), and store the smallest logit it keeps."""
    if tl.program_id(0) < tl.load(count):
        row = tl.load(listed + tl.program_id(0)).to(tl.int64)
        temperature, share = tl.load(temperatures + row), tl.load(top_p + row)
        state += row * (STATE + PIVOTS)
        sums += row * chunks * PIVOTS
        lo, hi, weighs, turn, target, top = narrowed(state, sums, share, chunks, SHIFT, PIVOTS, CHUNKS)
        while hi - lo > 1:
            tl.debug_barrier()  # between reading state and sums, and writing them anew
            remember(state, lo, hi, weighs, turn, target, top)
            for number in tl.static_range(TAIL):
                tl.store(state + STATE + number, pivot(lo, hi, number, turn < BY_VALUE, SHIFT, TAIL).to(tl.int32))
            add_weights(
                logits + row * logits_row, sums, temperature, lo, hi, weighs, turn, top,
                vocab, 0, 1, chunks, SHIFT, TAIL, BY_VALUE,
            )  # fmt: skip
            tl.debug_barrier()
            lo, hi, weighs, turn, target, top = narrowed(state, sums, share, chunks, SHIFT, TAIL, CHUNKS)
        tl.store(lowest + row, value_of(lo + 1, SHIFT))


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def log_probs_of_chunk_kernel(
    logits, tokens, sums, best, vocab, logits_row, chunks, NUMBER: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    """Find one chunk's largest logit, its sum of exp(logit - largest), how many beat the token, and the best ones.

    A logit and its token make one number, ``key << 32 | last id - token``: the largest is the best, of equals the one
    with the lowest id. The search for it is most of the work: ``NARROW`` makes numbers of half the bits, for logits of
    16 bits, as float32, have 13 zeros at their end, and a chunk is 2**13 tokens.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    row_logits = logits + row * logits_row
    x = tl.load(row_logits + token, token < vocab, -float("inf")).to(tl.float32)
    own = tl.load(row_logits + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    top = tl.maximum(tl.max(x, 0), -3.4028234663852886e38)  # -inf - -inf would be NaN
    sums += (row * chunks + chunk) * 3
    tl.store(sums, top)
    tl.store(sums + 1, tl.sum(tl.exp2((x - top) * 1.4426950408889634), 0))
    tl.store(sums + 2, tl.sum((x > own).to(tl.float32), 0))
    best += (row * chunks + chunk) * NUMBER
    if NARROW:
        word = key_of(x) + (CHUNK - 1 - tl.arange(0, CHUNK))
        none = tl.full([1], -2147483648, tl.int32)
    else:
        word = (key_of(x).to(tl.int64) << 32) + (2147483647 - token)
        none = tl.full([1], -9223372036854775808, tl.int64)
    word = tl.where(token < vocab, word, none)
    for place in range(NUMBER):
        largest = tl.max(word, 0)
        word = tl.where(word == largest, none, word)
        wide = largest.to(tl.int64)
        if NARROW:
            offset = CHUNK - 1 - (wide & (CHUNK - 1))
            wide = ((wide & -CHUNK) << 32) + (2147483647 - chunk * CHUNK - offset)
            wide = tl.where(largest == -2147483648, -9223372036854775808, wide)
        tl.store(best + place, wide)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def log_probs_of_row_kernel(
    logits, tokens, sums, best, given, own_out, rank_out, values, ids, named, logits_row, chunks,
    NUMBER: tl.constexpr, GIVEN: tl.constexpr, NORMALIZED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring one row's chunks together: each has ``NUMBER`` of its best, and so many come out; and so do the given."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    at = sums + (row * chunks + chunk) * 3
    tops = tl.load(at, chunk < chunks, -3.4028234663852886e38)
    parts = tl.load(at + 1, chunk < chunks, 0.0)
    top = tl.max(tops, 0)
    total = 0.0
    if NORMALIZED:
        total = top + tl.log(tl.sum(parts * tl.exp2((tops - top) * 1.4426950408889634), 0))
    for place in range(GIVEN):
        asked = tl.load(given + row * GIVEN + place)
        score = tl.load(logits + row * logits_row + asked).to(tl.float32)
        tl.store(named + row * GIVEN + place, score - total)
    own = tl.load(logits + row * logits_row + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    tl.store(own_out + row, own - total)
    tl.store(rank_out + row, 1 + tl.sum(tl.load(at + 2, chunk < chunks, 0.0), 0).to(tl.int64))
    column = tl.arange(0, BLOCK)
    word = tl.load(best + row * chunks * NUMBER + column, column < chunks * NUMBER, -9223372036854775808)
    for place in range(NUMBER):
        largest = tl.max(word, 0)
        word = tl.where(word == largest, -9223372036854775808, word)
        tl.store(values + row * NUMBER + place, value_of(largest >> 32, 0) - total)
        tl.store(ids + row * NUMBER + place, 2147483647 - (largest & 0xFFFFFFFF))


def greedy(logits: Tensor) -> Tensor:
    """See ``reference.greedy``."""
    return Draw(logits).tokens


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See ``reference.draw``."""
    return Draw(logits, seeds=seeds, positions=positions).tokens


def choose(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, *, filtered: bool,
) -> Tensor:  # fmt: skip
    """See ``reference.choose``."""
    drawn = Draw(logits, temperatures, seeds, positions, top_k if filtered else None)
    rows, vocab = logits.shape
    if not (filtered and rows):
        return drawn.tokens
    chunks = triton.cdiv(vocab, CHUNK.value)
    verdicts, listed, count = (torch.empty(n, dtype=torch.int32, device=logits.device) for n in (rows, rows, 1))
    sums = torch.empty(chunks, 2, rows, dtype=torch.float32, device=logits.device)
    settings = (temperatures, top_k, top_p, min_p)
    check_kernel[(rows, chunks)](
        logits, *settings, drawn.tokens, drawn.ranges, verdicts, sums, vocab, logits.stride(0), chunks,
        SHIFT=SHIFTS[logits.dtype], num_warps=WARPS, **FUSED,
    )  # fmt: skip
    list_kernel[(1,)](
        top_k, top_p, verdicts, sums, listed, count, vocab, rows,
        ROWS=triton.next_power_of_2(max(rows, 128)), CHUNKS=chunks, num_warps=WARPS, **FUSED,
    )  # fmt: skip
    lowest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _search(logits, settings, drawn, listed, count, lowest)
    drawn.again(listed, count, lowest)
    return drawn.tokens


def lowest_kept(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See ``reference.lowest_kept``; -inf for rows at temperature 0. Reads a row up to a dozen times."""
    lowest = torch.full((len(logits),), -torch.inf, dtype=torch.float32, device=logits.device)
    settings = (temperatures, top_k, top_p, min_p)
    limited = ((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1) | (min_p > 0)
    listed = ((temperatures > 0) & limited).nonzero()[:, 0].int()
    if len(listed):
        count = torch.full((1,), len(listed), dtype=torch.int32, device=logits.device)
        _search(logits, settings, Draw(logits, top_k=top_k), listed, count, lowest)
    return lowest


def _search(
    logits: Tensor, settings: tuple[Tensor, ...], drawn: "Draw", listed: Tensor, count: Tensor, lowest: Tensor
) -> None:
    """Store the smallest logits that the first ``count`` of the listed rows keep."""
    rows, vocab = logits.shape
    temperatures, _, top_p, _ = settings
    pivots, by_value, passes = FEW if rows < FEW_ROWS else MANY
    if logits.dtype is torch.float32:
        passes *= 2
    chunks = triton.cdiv(vocab, CHUNK.value)
    states = torch.empty(2, rows, STATE.value + pivots, dtype=torch.int32, device=logits.device)
    sums = torch.empty(2, rows, chunks, pivots, dtype=torch.float32, device=logits.device)
    shift, row = SHIFTS[logits.dtype], logits.stride(0)
    sizes = dict(SHIFT=shift, PIVOTS=pivots, BY_VALUE=by_value, CHUNKS=triton.next_power_of_2(chunks), num_warps=WARPS)
    for turn in range(passes):  # a pass reads what the one before left, and leaves its own beside it
        old, new = turn % 2, 1 - turn % 2
        search_kernel[(min(rows * chunks, MOST_PROGRAMS),)](
            logits, *settings, drawn.ranges, listed, count, states[old], states[new], sums[old], sums[new],
            vocab, row, chunks, FIRST=turn == 0, **sizes, **FUSED,
        )  # fmt: skip
    last = passes % 2
    settle_kernel[(rows,)](
        logits, temperatures, top_p, listed, count, states[last], sums[last], lowest, vocab, row, chunks,
        **sizes, **FUSED,
    )  # fmt: skip


def log_probs(
    logits: Tensor, tokens: Tensor, number: int, given: Tensor | None = None, *, normalized: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.log_probs``; the lowest id first among equals. ``number`` is at most ``MOST_LOGPROBS``."""
    rows, vocab = logits.shape
    device = logits.device
    kept = min(number, vocab)
    given = tokens.new_empty(rows, 0) if given is None else given
    own = torch.empty(rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int64, device=device)
    values = torch.empty(rows, kept, dtype=torch.float32, device=device)
    ids = torch.empty(rows, kept, dtype=torch.int64, device=device)
    named = torch.empty(given.shape, dtype=torch.float32, device=device)
    if rows:
        chunks = triton.cdiv(vocab, CHUNK.value)
        sums = torch.empty(rows, chunks, 3, dtype=torch.float32, device=device)
        best = torch.empty(rows, chunks, kept, dtype=torch.int64, device=device)
        log_probs_of_chunk_kernel[(rows, chunks)](
            logits, tokens, sums, best, vocab, logits.stride(0), chunks,
            NUMBER=kept, NARROW=SHIFTS[logits.dtype] >= 13, num_warps=WARPS, **FUSED,
        )  # fmt: skip
        log_probs_of_row_kernel[(rows,)](
            logits, tokens, sums, best, given, own, ranks, values, ids, named, logits.stride(0), chunks,
            NUMBER=kept, GIVEN=given.shape[1], NORMALIZED=normalized,
            CHUNKS=triton.next_power_of_2(chunks), BLOCK=triton.next_power_of_2(max(chunks * kept, 1)),
            num_warps=4, **FUSED,
        )  # fmt: skip
    return own, ranks, values, ids, named


class Draw:
    """The best tokens of all rows; with ``seeds`` drawn, at ``temperatures`` or at 1. ``again`` draws some anew.

    With ``top_k`` (0: no limit) it also finds between which keys the lines of the rows' filters may lie.
    """

    def __init__(
        self, logits: Tensor, temperatures: Tensor | None = None, seeds: Tensor | None = None,
        positions: Tensor | None = None, top_k: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._inputs = (logits, temperatures, seeds, positions)
        rows, vocab = logits.shape
        self._block = 4096 if rows >= 8 else 1024  # few rows: more programs, or most of the chip has nothing to do
        chunks, self._fines = triton.cdiv(vocab, self._block), triton.cdiv(vocab, FINE.value)
        device = logits.device
        self.tokens = torch.empty(rows, dtype=torch.int64, device=device)
        self._scores = torch.empty(rows, chunks, dtype=torch.float32, device=device)
        self._tokens = torch.empty(rows, chunks, dtype=torch.int32, device=device)
        self._top_k = top_k
        self._extremes = torch.empty(0 if top_k is None else rows, self._fines, 2, dtype=torch.float32, device=device)
        self.ranges = torch.empty(len(self._extremes), 2, dtype=torch.int32, device=device)
        """For each row the largest key that is known to lie below its line, and the key of its largest logit."""
        if rows:
            self._take((rows, chunks))

    def again(self, listed: Tensor, count: Tensor, lowest: Tensor) -> None:
        """Draw the first ``count`` of the listed rows anew, among the logits from ``lowest`` on."""
        self._take((min(self._scores.numel(), MOST_PROGRAMS),), lowest, listed, count)

    def _take(
        self, grid: tuple[int, ...],
        lowest: Tensor | None = None, listed: Tensor | None = None, count: Tensor | None = None,
    ) -> None:  # fmt: skip
        logits, temperatures, seeds, positions = self._inputs
        chunks, first = self._scores.shape[1], listed is None
        lists = {"LISTED": not first, "EXTREMES": first and self._top_k is not None}
        best_of_chunk_kernel[grid](
            logits, temperatures, lowest, seeds, positions, self._scores, self._tokens, self._extremes, listed, count,
            logits.shape[1], logits.stride(0), chunks, self._fines,
            NOISE=seeds is not None, SCALED=temperatures is not None, FAST=logits.is_cuda and torch.version.hip is None,
            BLOCK=self._block, num_warps=self._block // 512, **lists, **FUSED,
        )  # fmt: skip
        best_of_row_kernel[(len(logits),)](
            self._scores, self._tokens, self.tokens, listed, count, self._extremes, self._top_k, self.ranges,
            chunks, self._fines, SHIFT=SHIFTS[logits.dtype], FINES=triton.next_power_of_2(self._fines),
            BLOCK=triton.next_power_of_2(chunks), num_warps=1, **lists, **FUSED,
        )  # fmt: skip

"""Choosing tokens without a sort, without a copy of the logits, and without a word from the host.

Draws. A row is cut into chunks, a program each; a second, small kernel takes the best of a row's chunks. The noise is
made where it is used and never stored:

    logits of a row   [ chunk 0 | chunk 1 | chunk 2 ]
    best of each      [ 3.1, 17 | 9.2, 70 | 2.5, 99 ]   score, token
    best of all                   70

Scores equal the reference's up to the rounding of two logarithms and of a division, so a draw differs from it only
where the two best scores nearly tie; it is the same however a row is cut.

Filters. A token stays if the tokens with larger logits weigh less than a target: each weighs 1 and the target is top_k,
or each weighs its probability and the target is a share top_p of the whole. The weight above x falls as x grows, so the
line is found by bisection, each pass with several pivots. Floats are numbered in their order (``key_of``), so that it
ends exactly: the line lies in (lo, hi], where the weight above lo reaches the target and that above hi does not.

    keys             lo . . . . p1 . . . . p2 . . . . p3 . . . . hi
    weight above     9          7          4          1          0      target 5: the line is in (p1, p2]

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
FEW_ROWS = 16
"""Under this, passes wait for each other rather than for their work: fewer of them, with more pivots in each."""
FEW, MANY = (16, 1, 6), (4, 3, 10)
"""Pivots of a pass, passes that space them by value, and passes planned; the last twice for logits of 32 bits."""
TAIL = tl.constexpr(4)
"""Pivots of the passes that a row may lack when the planned ones are over."""

SETTINGS = ["temperatures", "top_k", "top_p", "min_p", "lowest", "seeds", "positions", "tokens"]
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


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def best_of_chunk_kernel(
    logits, temperatures, lowest, seeds, positions, best_scores, best_tokens, vocab, logits_row, chunks,
    NOISE: tl.constexpr, SCALED: tl.constexpr, FILTERED: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best score of one chunk of a row, and the lowest token that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: row * vocab passes 2**31
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * logits_row + token, token < vocab, -float("inf")).to(tl.float32)
    if NOISE:
        temperature = tl.load(temperatures + row) if SCALED else 1.0
        if temperature > 0:
            noisy = score * (1.0 / temperature) + gumbel(tl.load(seeds + row), tl.load(positions + row), token, FAST)
            if FILTERED:
                noisy = tl.where(score < tl.load(lowest + row), -float("inf"), noisy)  # NaN stays
            score = noisy
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


@triton.jit
def key_of(x):
    """Number a float32 in the order of floats: its magnitude's bits, with its sign. Both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


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
def opened(extremes, temperature, top_k, top_p, min_p, vocab, programs, SHIFT: tl.constexpr, PROGRAMS: tl.constexpr):
    """Return a row's first state: everything down to its smallest logit, or to its min_p."""
    program = tl.arange(0, PROGRAMS)
    top = tl.max(tl.load(extremes + 2 * program, program < programs, -float("inf")), 0)
    least = tl.min(tl.load(extremes + 2 * program + 1, program < programs, float("inf")), 0)
    lo = (key_of(least) >> SHIFT).to(tl.int64) - 1
    hi = (key_of(top) >> SHIFT).to(tl.int64)
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
def add_weights(
    row_logits, sums, temperature, lo, hi, weighs, turn, top, vocab, first, step, chunks,
    SHIFT: tl.constexpr, PIVOTS: tl.constexpr, BY_VALUE: tl.constexpr,
):  # fmt: skip
    """Add up what lies above each pivot, in every ``step``-th chunk of a row."""
    scale = 1.4426950408889634 / temperature
    for chunk in range(first, chunks, step):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(row_logits + token, token < vocab, -float("inf")).to(tl.float32)
        weight = tl.full([CHUNK], 1.0, tl.float32)
        if weighs == 1:
            weight = tl.exp2(tl.fma(x, scale, -top * scale))
        for number in tl.static_range(PIVOTS):
            line = value_of(pivot(lo, hi, number, turn < BY_VALUE, SHIFT, PIVOTS), SHIFT)
            tl.store(sums + chunk * PIVOTS + number, tl.sum((x > line).to(tl.float32) * weight, 0))


@triton.jit
def filters(temperature, top_k, top_p, min_p, vocab):
    """Whether a row's filters keep less than everything."""
    return (temperature > 0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0))


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def extremes_kernel(logits, temperatures, top_k, top_p, min_p, extremes, vocab, logits_row, chunks):
    """Find the largest logit and the smallest but for -inf in each program's chunks of a row that filters."""
    row, program, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if filters(tl.load(temperatures + row), tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), vocab):
        top = tl.full([CHUNK], -float("inf"), tl.float32)
        least = tl.full([CHUNK], float("inf"), tl.float32)
        for chunk in range(program, chunks, programs):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + row * logits_row + token, token < vocab, -float("inf")).to(tl.float32)
            top = tl.maximum(top, x)
            least = tl.minimum(least, tl.where(x > -float("inf"), x, float("inf")))
        tl.store(extremes + (row * programs + program) * 2, tl.max(top, 0))
        tl.store(extremes + (row * programs + program) * 2 + 1, tl.min(least, 0))


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def search_kernel(
    logits, temperatures, top_k, top_p, min_p, extremes, state, new_state, sums, new_sums, vocab, logits_row, chunks,
    FIRST: tl.constexpr, SHIFT: tl.constexpr, PIVOTS: tl.constexpr, BY_VALUE: tl.constexpr,
    PROGRAMS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Make one pass: every program of a row settles the last one for itself, then adds up its own chunks."""
    row, program, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, share = tl.load(temperatures + row), tl.load(top_p + row)
    if filters(temperature, tl.load(top_k + row), share, tl.load(min_p + row), vocab):
        words: tl.constexpr = STATE + PIVOTS
        if FIRST:
            lo, hi, weighs, turn, target, top = opened(
                extremes + row * programs * 2, temperature, tl.load(top_k + row), share, tl.load(min_p + row),
                vocab, programs, SHIFT, PROGRAMS,
            )  # fmt: skip
        else:
            lo, hi, weighs, turn, target, top = narrowed(
                state + row * words, sums + row * chunks * PIVOTS, share, chunks, SHIFT, PIVOTS, CHUNKS
            )
        if program == 0:
            remember(new_state + row * words, lo, hi, weighs, turn, target, top)
        if hi - lo > 1:
            if program == 0:
                for number in tl.static_range(PIVOTS):
                    key = pivot(lo, hi, number, turn < BY_VALUE, SHIFT, PIVOTS)
                    tl.store(new_state + row * words + STATE + number, key.to(tl.int32))
            add_weights(
                logits + row * logits_row, new_sums + row * chunks * PIVOTS, temperature, lo, hi, weighs, turn, top,
                vocab, program, programs, chunks, SHIFT, PIVOTS, BY_VALUE,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def settle_kernel(
    logits, temperatures, top_k, top_p, min_p, state, sums, lowest, vocab, logits_row, chunks,
    SHIFT: tl.constexpr, PIVOTS: tl.constexpr, BY_VALUE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Settle the last pass, make those that a row still lacks (few do), and store the smallest logit it keeps."""
    row = tl.program_id(0).to(tl.int64)
    temperature, share = tl.load(temperatures + row), tl.load(top_p + row)
    line = -float("inf")
    if filters(temperature, tl.load(top_k + row), share, tl.load(min_p + row), vocab):
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
        line = value_of(lo + 1, SHIFT)
    tl.store(lowest + row, line)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def log_probs_of_chunk_kernel(logits, tokens, sums, best, vocab, logits_row, chunks, NUMBER: tl.constexpr):
    """Find one chunk's largest logit, its sum of exp(logit - largest), how many beat the token, and the best ones.

    A logit and its token make one number, ``key << 32 | last id - token``: the largest is the best, of equals the one
    with the lowest id.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    row_logits = logits + row * logits_row
    x = tl.load(row_logits + token, token < vocab, -float("inf")).to(tl.float32)
    own = tl.load(row_logits + tl.load(tokens + row)).to(tl.float32)
    top = tl.maximum(tl.max(x, 0), -3.4028234663852886e38)  # -inf - -inf would be NaN
    sums += (row * chunks + chunk) * 3
    tl.store(sums, top)
    tl.store(sums + 1, tl.sum(tl.exp2((x - top) * 1.4426950408889634), 0))
    tl.store(sums + 2, tl.sum((x > own).to(tl.float32), 0))
    word = (key_of(x).to(tl.int64) << 32) + (2147483647 - token)
    word = tl.where(token < vocab, word, -9223372036854775808)
    best += (row * chunks + chunk) * NUMBER
    for place in range(NUMBER):
        largest = tl.max(word, 0)
        tl.store(best + place, largest)
        word = tl.where(word == largest, -9223372036854775808, word)


@triton.jit(do_not_specialize_on_alignment=SETTINGS)
def log_probs_of_row_kernel(
    logits, tokens, sums, best, own_out, rank_out, values, ids, logits_row, chunks,
    NUMBER: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring one row's chunks together: each has ``NUMBER`` of its best, and so many come out."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    at = sums + (row * chunks + chunk) * 3
    tops = tl.load(at, chunk < chunks, -3.4028234663852886e38)
    parts = tl.load(at + 1, chunk < chunks, 0.0)
    top = tl.max(tops, 0)
    total = top + tl.log(tl.sum(parts * tl.exp2((tops - top) * 1.4426950408889634), 0))
    own = tl.load(logits + row * logits_row + tl.load(tokens + row)).to(tl.float32)
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
    return _best(logits)


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See ``reference.draw``."""
    return _best(logits, seeds=seeds, positions=positions)


def choose(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, *, filtered: bool,
) -> Tensor:  # fmt: skip
    """See ``reference.choose``."""
    lowest = lowest_kept(logits, temperatures, top_k, top_p, min_p) if filtered else None
    return _best(logits, temperatures, lowest, seeds, positions)


def lowest_kept(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See ``reference.lowest_kept``; -inf for rows at temperature 0. Reads a row up to a dozen times."""
    rows, vocab = logits.shape
    few = rows < FEW_ROWS
    pivots, by_value, passes = FEW if few else MANY
    if logits.dtype is torch.float32:
        passes *= 2
    chunks = triton.cdiv(vocab, CHUNK.value)
    programs = chunks if few else min(chunks, 4)
    shift = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[logits.dtype]
    device = logits.device
    lowest = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return lowest
    extremes = torch.empty(rows, programs, 2, dtype=torch.float32, device=device)
    states = torch.empty(2, rows, STATE.value + pivots, dtype=torch.int32, device=device)
    sums = torch.empty(2, rows, chunks, pivots, dtype=torch.float32, device=device)
    settings = (temperatures, top_k, top_p, min_p)
    sizes = dict(SHIFT=shift, PIVOTS=pivots, BY_VALUE=by_value, CHUNKS=triton.next_power_of_2(chunks), num_warps=WARPS)
    row = logits.stride(0)
    extremes_kernel[(rows, programs)](logits, *settings, extremes, vocab, row, chunks, num_warps=WARPS, **FUSED)
    for turn in range(passes):  # a pass reads what the one before left, and leaves its own beside it
        old, new = turn % 2, 1 - turn % 2
        search_kernel[(rows, programs)](
            logits, *settings, extremes, states[old], states[new], sums[old], sums[new], vocab, row, chunks,
            FIRST=turn == 0, PROGRAMS=triton.next_power_of_2(programs), **sizes, **FUSED,
        )  # fmt: skip
    last = passes % 2
    settle_kernel[(rows,)](logits, *settings, states[last], sums[last], lowest, vocab, row, chunks, **sizes, **FUSED)
    return lowest


def log_probs(logits: Tensor, tokens: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``reference.log_probs``; the lowest id first among equals. ``number`` is at most ``MOST_LOGPROBS``."""
    rows, vocab = logits.shape
    device = logits.device
    kept = min(number, vocab)
    own = torch.empty(rows, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int64, device=device)
    values = torch.empty(rows, kept, dtype=torch.float32, device=device)
    ids = torch.empty(rows, kept, dtype=torch.int64, device=device)
    if rows:
        chunks = triton.cdiv(vocab, CHUNK.value)
        sums = torch.empty(rows, chunks, 3, dtype=torch.float32, device=device)
        best = torch.empty(rows, chunks, kept, dtype=torch.int64, device=device)
        log_probs_of_chunk_kernel[(rows, chunks)](
            logits, tokens, sums, best, vocab, logits.stride(0), chunks, NUMBER=kept, num_warps=WARPS, **FUSED
        )
        log_probs_of_row_kernel[(rows,)](
            logits, tokens, sums, best, own, ranks, values, ids, logits.stride(0), chunks, NUMBER=kept,
            CHUNKS=triton.next_power_of_2(chunks), BLOCK=triton.next_power_of_2(max(chunks * kept, 1)),
            num_warps=4, **FUSED,
        )  # fmt: skip
    return own, ranks, values, ids


def _best(
    logits: Tensor, temperatures: Tensor | None = None, lowest: Tensor | None = None,
    seeds: Tensor | None = None, positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Take the best logit; with ``seeds`` draw, at ``temperatures`` or at 1, among ``lowest`` and above or all."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    block = 4096 if rows >= 8 else 1024  # few rows: more programs, or most of the chip has nothing to do
    chunks = triton.cdiv(vocab, block)
    scores = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    best_of_chunk_kernel[(rows, chunks)](
        logits, temperatures, lowest, seeds, positions, scores, tokens, vocab, logits.stride(0), chunks,
        NOISE=seeds is not None, SCALED=temperatures is not None, FILTERED=lowest is not None,
        FAST=logits.is_cuda and torch.version.hip is None, BLOCK=block, num_warps=block // 512, **FUSED,
    )  # fmt: skip
    best_of_row_kernel[(rows,)](scores, tokens, out, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, **FUSED)
    return out

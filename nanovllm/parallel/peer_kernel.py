"""The kernel of ``peer``: every rank adds up all ranks' numbers, which it reads in their memories.

    memory of a rank   [ arrivals: 2 x PROGRAMS int64 | even calls: ELEMENTS | odd calls: ELEMENTS ]

Program p of every rank has the elements [p * BLOCK, (p + 1) * BLOCK) of each half, in every call, and two counters of
arrivals, one for each half. It deals with program p of the other ranks alone. Its call number t:

    1  copy the own elements into the own half t % 2
    2  add 1 to the others' counters of that half       release: what it wrote and read before comes first
    3  wait until the own one says that all have come   acquire: what they wrote can be read
    4  read all ranks' elements there, and add them up

Nobody overwrites what another still reads. Rank r writes to a half again in call t + 2, so it has waited in call t + 1
for every s, which had then ended 4 of call t: its programs follow each other. Nobody counts an arrival twice either:
what adds to the counter of half t % 2 next is call t + 2, and s gets there only after r's arrival in t + 1, which comes
after r's waiting in t. So between two waits at one counter it grows by one for each other rank, however far ahead they
are. Counters and numbers of calls lie on the device: a replayed graph goes on where the last one was. They have 64 bits
and never come round. All this holds for calls of any size in any order, for a smaller one has fewer programs, and
those have the same elements and counters as ever.

A program waits for those of the same number elsewhere. They start in the order of their numbers, so the lowest that is
not done runs everywhere, and none waits for one that cannot start.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.kernels import FUSED
from nanovllm.ops.overlap import launch_options, release, wait

ELEMENTS = 2**21
"""Most numbers in a call, of two bytes each."""

BLOCK, WARPS = 1024, 4
"""Numbers of a program: one load of 16 bytes for each thread."""

PROGRAMS = ELEMENTS // BLOCK

SPINS = 1024
"""Looks at a counter before one at the host's word: a millisecond or so."""

MEMORY_BYTES = 2 * PROGRAMS * 8 + 2 * ELEMENTS * 2


@triton.jit
def one_shot_kernel(
    x, residual, addresses, calls, count, RANK: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr,
    ELEMENTS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, SPINS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Add up a block of ``x`` over ranks, in place, and to that a residual, if there is one.

    ``addresses``: the ranks' memories, and the host's word.
    """
    release(WAITS)
    program = tl.program_id(0)
    ranks = tl.arange(0, LANES)
    counters = tl.load(addresses + ranks, ranks < SIZE, 0).to(tl.pointer_type(tl.int64))
    memories = ()
    for rank in tl.static_range(SIZE):
        memories += (tl.load(addresses + rank),)
    word = tl.load(addresses + SIZE).to(tl.pointer_type(tl.int64))
    wait(WAITS)
    call = tl.load(calls + program)
    half = call & 1
    counter = half * PROGRAMS + program
    arrivals = memories[RANK].to(tl.pointer_type(tl.int64)) + counter
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    mine = tl.load(x + place, inside, 0.0)
    tl.store(_elements(memories[RANK], half, place, x, PROGRAMS, ELEMENTS), mine, inside)
    more = 0.0
    if residual is not None:
        more = tl.load(residual + place, inside, 0.0).to(tl.float32)
    tl.debug_barrier()  # one thread speaks for all of the program
    tl.atomic_add(counters + counter, 1, (ranks < SIZE) & (ranks != RANK), sem="release", scope="sys")

    expected = ((call >> 1) + 1) * (SIZE - 1)
    seen = tl.atomic_add(arrivals, 0, sem="acquire", scope="sys")
    spins = 0
    while seen < expected:
        spins += 1
        if spins % SPINS == 0:
            # what the host adds ends the waiting, here and later. It goes by the counter, which one thread reads for
            # all: threads that each read the word might not leave this loop together
            tl.atomic_add(arrivals, tl.load(word, volatile=True), sem="relaxed", scope="sys")
        seen = tl.atomic_add(arrivals, 0, sem="acquire", scope="sys")

    for rank in tl.static_range(SIZE):
        if rank == RANK:
            piece = mine
        else:
            piece = tl.load(_elements(memories[rank], half, place, x, PROGRAMS, ELEMENTS), inside, 0.0)
        if rank == 0:
            total = piece.to(tl.float32)
        else:
            total += piece.to(tl.float32)
    if residual is not None:
        total = total.to(x.dtype.element_ty).to(tl.float32) + more
    tl.store(x + place, total.to(x.dtype.element_ty), inside)
    tl.store(calls + program, call + 1)


@triton.jit
def _elements(memory, half, place, x, PROGRAMS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return pointers to a block of elements in a rank's memory."""
    start = (memory + 2 * PROGRAMS * 8 + half * ELEMENTS * 2).to(tl.pointer_type(x.dtype.element_ty))
    return tl.max_contiguous(tl.multiple_of(start + place, 16), 8)  # they may be read 16 bytes at a time


def all_reduce(x: Tensor, residual: Tensor | None, addresses: Tensor, calls: Tensor, rank: int, size: int) -> None:
    """Add up ``x`` over ranks, in place: at most ``ELEMENTS`` numbers of two bytes, side by side as in ``residual``.

    In float32, from rank 0's to the last rank's, with one rounding at the end; the residual, which each rank has, is
    added to the rounded sum, with another. ``addresses`` int64 [size + 1] and ``calls`` int64 [PROGRAMS]; calls begin
    with zeros as the counters do.
    """
    one_shot_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, residual, addresses, calls, x.numel(), RANK=rank, SIZE=size, LANES=triton.next_power_of_2(size),
        ELEMENTS=ELEMENTS, PROGRAMS=PROGRAMS, BLOCK=BLOCK, SPINS=SPINS, num_warps=WARPS,
        **launch_options(x), **FUSED,
    )  # fmt: skip

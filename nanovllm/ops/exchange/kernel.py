"""Messages in one launch each. The host's memory is pinned: a device reads and writes it where it lies.

Loads are ordinary ones: with ``volatile`` each word is a request of its own over the bus, and those of 256 rows
take 60 us. What the host has written before a launch can be read by its first kernel.
"""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.overlap import launch_options, release, wait

BLOCK = 1024
"""Words that a program copies."""


@triton.jit(do_not_specialize=["words"])  # it changes with each graph: nothing should be compiled for it
def receive_kernel(inbox, turn, message, slots, most, words, BLOCK: tl.constexpr):
    """Copy ``BLOCK`` words, the first of them in any case: to learn how many there are takes as long as to get them.

    Kernels may read the message before they ``wait``, so the next one must be launched without that option.
    """
    slot = inbox + tl.load(turn) % slots * most
    begin = tl.program_id(0) * BLOCK
    at = begin + tl.arange(0, BLOCK)
    number = words
    if begin > 0:
        number = tl.load(slot)
    if begin < number:
        tl.store(message + at, tl.load(slot + at, at < words), at < words)


def receive(inbox: Tensor, turn: Tensor, message: Tensor) -> None:
    """See ``reference.receive``. Up to ``BLOCK`` - 1 words behind a message may be copied with it."""
    (slots, most), words = inbox.shape, message.shape[0]
    receive_kernel[(triton.cdiv(words, BLOCK),)](inbox, turn, message, slots, most, words, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["rows"])
def deliver_kernel(tokens, kept, outbox, turn, slots, most, rows, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    """All of it in one program: nobody reads the turn while it changes."""
    release(WAITS)
    wait(WAITS)
    this = tl.load(turn)
    tl.debug_barrier()  # every thread has read it
    at = tl.arange(0, BLOCK)
    found = tl.load(tokens + at, at < rows)
    tl.store(kept + at, found, at < rows)
    tl.store(outbox + this % slots * most + at, found, at < rows)
    tl.store(turn, this + 1)


def deliver(tokens: Tensor | None, kept: Tensor, outbox: Tensor, turn: Tensor) -> None:
    """See ``reference.deliver``."""
    rows = 0 if tokens is None else tokens.shape[0]
    block = max(32, triton.next_power_of_2(rows))
    deliver_kernel[(1,)](
        kept if tokens is None else tokens, kept, outbox, turn, *outbox.shape, rows,
        BLOCK=block, num_warps=max(1, min(8, block // 128)), **launch_options(kept),
    )  # fmt: skip

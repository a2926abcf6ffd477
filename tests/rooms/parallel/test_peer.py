"""The kernel that adds up over ranks, in Triton's interpreter: ranks are processes that share memory, as GPUs do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.ops.kernels import TRITON

pytestmark = pytest.mark.skipif(not TRITON, reason="needs triton")

ROOT = Path(__file__).parents[3]

RANK = """
import mmap, sys, threading
import torch
from nanovllm.parallel import peer_kernel as kernel

descriptor, rank, size, calls = map(int, sys.argv[1:5])
shared = torch.frombuffer(mmap.mmap(descriptor, size * kernel.MEMORY_BYTES), dtype=torch.uint8)
memories = shared.view(size, -1)
word = torch.zeros(1, dtype=torch.int64)
addresses = torch.tensor([*(memory.data_ptr() for memory in memories), word.data_ptr()])
most = 4 * kernel.BLOCK
done = torch.zeros(kernel.PROGRAMS, dtype=torch.int64)


def numbers(rank, call):
    "Sums of these are exact: an order that is not that of ranks would not show."
    generator = torch.Generator().manual_seed(1000 * call + rank)
    count = int(torch.randint(1, most, (), generator=torch.Generator().manual_seed(call)))
    return torch.randint(-16, 17, (count,), generator=generator).to([torch.bfloat16, torch.float16][call % 2])


def work():
    for call in range(calls):
        x = numbers(rank, call)
        kernel.all_reduce(x, addresses, done, rank, size)
        expected = sum(numbers(other, call).float() for other in range(size))
        if not torch.equal(x.float(), expected):
            memories[:, : 2 * kernel.PROGRAMS * 8].view(torch.int64).fill_(2**62)  # or others would wait for ever
            sys.exit(f"rank {rank}, call {call}: {int((x.float() != expected).sum())} of {len(x)} numbers are wrong")
"""

ALL = (
    RANK
    + """
work()
print(int(done[0]), memories[rank, : 2 * kernel.PROGRAMS * 8].view(torch.int64).view(2, -1)[:, 0].tolist())
"""
)

LATE = (
    RANK
    + """
elements = kernel._elements

def late(memory, half, place, *rest):
    "Look at the other's numbers only when it has written and announced those of the next call."
    call = int(done[0])
    if rank == 0 and int(memory.handle.data[0]) != addresses[0] and call + 1 < calls:
        arrivals = memories[0, (call + 1) % 2 * kernel.PROGRAMS * 8 :][:8].view(torch.int64)
        while arrivals.item() <= (call + 1) // 2:
            pass
    return elements(memory, half, place, *rest)

kernel._elements = late
most = kernel.BLOCK  # the interpreter runs programs one by one: while one is late, no other comes
work()
print("right")
"""
)

ALONE = (
    RANK
    + """
def release():
    arrivals = memories[1, :8].view(torch.int64)
    while not arrivals.item():  # until rank 0 has come, and waits
        pass
    word.fill_(2**62)

kernel.SPINS = 8
thread = threading.Thread(target=release)
thread.start()
for call in range(4):
    kernel.all_reduce(numbers(0, call), addresses, done, rank, size)
thread.join()
print("free")
"""
)


def run(code, ranks, size, calls=0):
    """Return what each of the ``ranks`` prints; an error of one is an error."""
    from nanovllm.parallel.peer_kernel import MEMORY_BYTES

    descriptor = os.memfd_create("ranks")
    try:
        os.ftruncate(descriptor, size * MEMORY_BYTES)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, *map(str, (descriptor, rank, size, calls))], pass_fds=(descriptor,),
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in ranks
        ]  # fmt: skip
        try:
            told = [process.communicate(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    finally:
        os.close(descriptor)
    assert [process.returncode for process in processes] == [0] * len(processes), [error for _, error in told]
    return [said.strip() for said, _ in told]


@pytest.mark.parametrize(("size", "calls"), [(2, 60), (3, 40)])
def test_every_rank_gets_the_sum_in_calls_of_changing_sizes(size, calls):
    """No barrier stands between calls: ranks are as far ahead of each other as the kernel lets them."""
    arrivals = calls // 2 * (size - 1)
    assert run(ALL, range(size), size, calls) == [f"{calls} {[arrivals, arrivals]}"] * size


def test_nobody_overwrites_what_a_late_rank_still_reads():
    assert run(LATE, range(2), 2, 8) == ["right"] * 2


def test_a_rank_that_waits_in_vain_can_be_freed():
    assert run(ALONE, [0], 2) == ["free"]

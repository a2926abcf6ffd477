"""The kernel that adds up over ranks, in Triton's interpreter: ranks are processes that share memory, as GPUs do. And
how ranks come to share it, on a stand-in for CUDA's driver.
"""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from nanovllm.errors import EngineError
from nanovllm.ops.kernels import TRITON
from nanovllm.parallel import peer

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
        residual = numbers(99, call) if call % 3 else None
        kernel.all_reduce(x, residual, addresses, done, rank, size)
        expected = sum(numbers(other, call).float() for other in range(size))
        if residual is not None:
            expected += residual.float()
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
    kernel.all_reduce(numbers(0, call), None, addresses, done, rank, size)
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


@pytest.mark.parametrize(("size", "calls"), [(2, 40), (3, 20)])
def test_every_rank_gets_the_sum_in_calls_of_changing_sizes(size, calls):
    """No barrier stands between calls: ranks are as far ahead of each other as the kernel lets them."""
    arrivals = calls // 2 * (size - 1)
    assert run(ALL, range(size), size, calls) == [f"{calls} {[arrivals, arrivals]}"] * size


def test_nobody_overwrites_what_a_late_rank_still_reads():
    assert run(LATE, range(2), 2, 8) == ["right"] * 2


def test_a_rank_that_waits_in_vain_can_be_freed():
    assert run(ALONE, [0], 2) == ["free"]


class Driver:
    """Allocates and maps numbers in place of memories. One rank, a thread, fails in one function."""

    def __init__(self, failing=(None, None)):
        self.failing = failing
        self.here = threading.local()
        self.held = {}

    def __call__(self, name, *arguments):
        rank = self.here.rank
        if (name, rank) == self.failing and name != "cuDeviceGetP2PAttribute":
            raise EngineError(f"{name} failed: PLANTED.")
        result = getattr(arguments[0], "_obj", None) if arguments else None
        if name == "cuMemAlloc_v2":
            assert arguments[1].value >= 2**23
            result.value = 1 + rank
            self.held[rank] = {("cuMemFree_v2", 1 + rank)}
        elif name == "cuIpcGetMemHandle":
            assert arguments[1].value == 1 + rank
            result.reserved[63] = 1 + rank
        elif name == "cuDeviceGetP2PAttribute":
            result.value = (name, rank) != self.failing
        elif name == "cuIpcOpenMemHandle_v2":
            result.value = 100 * (1 + rank) + arguments[1].reserved[63]
            self.held[rank].add(("cuIpcCloseMemHandle", result.value))
        elif name in ("cuMemFree_v2", "cuIpcCloseMemHandle"):
            self.held[rank].remove((name, arguments[0].value))
            mapped = [place % 100 for held in self.held.values() for _, place in held if place > 100]
            assert arguments[0].value not in mapped, "freed while another rank has it mapped"


@pytest.fixture
def connected(monkeypatch, kit):
    """Return what ranks that are threads get, and the driver; a faster communicator shows as its memories."""

    def connect(size, *failing):
        driver = Driver(failing or (None, None))
        monkeypatch.setattr(peer, "_driver", driver)
        monkeypatch.setattr(peer, "OneShot", lambda below, device, memories: memories)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: None)

        def work(below):
            driver.here.rank = below.rank
            found = peer.one_shot(below, torch.device("cpu", below.rank))
            return "NCCL" if found is below else found

        return kit.on_ranks(size, work), driver

    return connect


def test_every_rank_maps_the_memories_of_all_others(connected):
    found, driver = connected(3)
    assert found == [{0: 1, 1: 102, 2: 103}, {0: 201, 1: 2, 2: 203}, {0: 301, 1: 302, 2: 3}]
    assert [len(driver.held[rank]) for rank in range(3)] == [3, 3, 3]


FUNCTIONS = ["cuMemAlloc_v2", "cuMemsetD8_v2", "cuIpcGetMemHandle", "cuDeviceGetP2PAttribute", "cuIpcOpenMemHandle_v2"]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("rank", [0, 2])
def test_where_one_rank_cannot_all_leave_it_to_nccl_and_keep_nothing(connected, caplog, name, rank):
    found, driver = connected(3, name, rank)
    assert found == ["NCCL"] * 3
    assert not any(driver.held.values())
    (why,) = [text for text in caplog.messages if text.startswith(f"rank {rank} leaves all sums to NCCL: ")]
    assert "PLANTED" in why or f"device {rank} has no access in the memory of device" in why
    assert len(caplog.messages) == 3


def test_without_triton_there_is_nothing_to_share(connected, caplog, monkeypatch):
    monkeypatch.setattr(peer, "TRITON", False)
    found, driver = connected(2)
    assert found == ["NCCL"] * 2 and not driver.held
    assert "leaves all sums to NCCL: Triton is not installed." in caplog.text

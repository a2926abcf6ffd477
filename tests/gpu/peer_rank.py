"""One rank of ``test_peer``: a case by its name, NCCL's identity, the rank and how many there are."""

import gc
import os
import signal
import sys
import time

import torch

from nanovllm.config import configure_logging
from nanovllm.errors import EngineError
from nanovllm.parallel import peer, peer_kernel
from nanovllm.parallel.communicator import NCCL
from nanovllm.parallel.peer import MOST_BYTES, OneShot, one_shot

case, identity, rank, size = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
device = torch.device("cuda", rank)
MOST = MOST_BYTES // 2


def numbers(count, seed, dtype=torch.bfloat16):
    """Every rank's numbers, on this device: [size, count]. Large and small ones, so that the order shows."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.randn(size, count, generator=generator, device=device)
    return (drawn * 4 ** torch.randint(-4, 5, drawn.shape, generator=generator, device=device)).to(dtype)


def total(pieces):
    """What ``all_reduce`` means."""
    found = pieces[0].float()
    for piece in pieces[1:]:
        found = found + piece.float()
    return found.to(pieces.dtype)


def sums(connection):
    sizes = [1, 2, 7, 8, 9, 16, 1000, 1023, 1024, 1025, 2048, 4096, 5120, 8 * 4096, 64 * 5120]
    sizes += [MOST - 1024, MOST - 1, MOST, MOST + 1, peer_kernel.ELEMENTS, peer_kernel.ELEMENTS + 1]
    for most in (MOST_BYTES, 2 * peer_kernel.ELEMENTS):
        connection.most_bytes = most
        for place, count in enumerate(sizes * 2):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                pieces = numbers(count + 1, place, dtype)
                again = pieces[rank, 1:].clone()
                x = again.clone() if place % 2 else pieces[rank, 1:]  # the latter begins at an odd address
                expected = total(pieces[:, 1:])
                found = connection.all_reduce(x)
                ours = dtype is not torch.float32 and 2 * count <= most
                if ours or size == 2:
                    assert torch.equal(found, expected), (count, dtype, most)
                residual = numbers(count + 1, 99, dtype)[0, 1:]
                first, second = connection.plus(again, residual)
                assert (second is None) == ours, (count, dtype, most)
                if ours:
                    right = (expected.float() + residual.float()).to(dtype)
                    assert torch.equal(first, right), (count, dtype, most)
                everywhere = connection.all_gather(found.float())
                assert (everywhere == everywhere[0]).all(), (count, dtype, most)
    strided = numbers(200, 5)[rank].view(10, 20)[:, ::2]
    assert torch.equal(connection.all_reduce(strided), total(numbers(200, 5)).view(10, 20)[:, ::2])
    assert connection.all_reduce(torch.zeros(0, 8, dtype=torch.bfloat16, device=device)).shape == (0, 8)


def back_to_back(connection):
    """10,000 calls of sizes that change, with nothing between them; a rank is late now and then."""
    draw = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 64 * 1024, (10_000,), generator=draw).tolist()
    counts = [count if place % 3 else count % 4096 + 1 for place, count in enumerate(counts)]
    bank = numbers(64 * 1024, 1)
    expected = total(bank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(counts), 100):
        some = counts[start : start + 100]
        inputs = [bank[rank, :count].clone() for count in some]
        for place, x in enumerate(inputs):
            if place % 25 == rank:
                torch.cuda._sleep(200_000)
            connection.all_reduce(x)
        for x in inputs:
            wrong += (x != expected[: len(x)]).sum()
    assert int(wrong) == 0


def recorded(step):
    """Make a step once, and return it as a CUDA graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        step()
    return graph


def replays(connection):
    """1,000 replays of a graph of several sizes, and calls between them."""
    counts = [4096, 5120, 8 * 4096, 1, MOST, 3 * 1024 + 5]
    pieces = [numbers(count, count) for count in counts]
    sources = [each[rank].clone() for each in pieces]
    expected = [total(each) for each in pieces]
    held = [torch.empty_like(source) for source in sources]
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def step():
        for x, source in zip(held, sources, strict=True):
            x.copy_(source)
            connection.all_reduce(x)
        for x, right in zip(held, expected, strict=True):
            wrong.add_((x != right).sum())

    graph = recorded(step)
    for replay in range(1000):
        graph.replay()
        if replay % 100 == 0:
            step()
    assert int(wrong) == 0


def lost(connection, graphs=False):
    """Rank 1 dies while rank 0 waits for it; the guard's ``close`` frees rank 0."""
    x = torch.ones(4096, dtype=torch.bfloat16, device=device)

    def step():
        for _ in range(10):
            connection.all_reduce(x)

    graph = recorded(step)
    for _ in range(2):
        graph.replay() if graphs else step()
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(20):
        graph.replay() if graphs else step()
    ended = torch.cuda.Event()
    ended.record()
    assert sys.stdin.readline() == "it is gone\n"
    assert not ended.query(), "nothing waited for the other rank"
    started = time.monotonic()
    connection.close()
    ended.synchronize()
    assert time.monotonic() - started < 10
    connection.close()
    assert float(torch.ones(3, device=device).sum()) == 3


def main():
    configure_logging()
    torch.cuda.set_device(device)
    nccl = NCCL(identity, rank, size, device)
    if case == "refused" and rank == 1:

        def refuse(*_):
            raise EngineError("no memory today")

        peer._offer = refuse
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    connection = one_shot(nccl, device)
    if case == "refused":
        assert connection is nccl
        x = torch.ones(8, dtype=torch.bfloat16, device=device)
        assert connection.all_reduce(x).tolist() == [size] * 8
        return
    assert isinstance(connection, OneShot), "the devices of this machine do not reach each other's memory"
    assert torch.cuda.mem_get_info()[0] < free
    cases = {"sums": sums, "back_to_back": back_to_back, "replays": replays, "lost": lost}
    if case in cases:
        cases[case](connection)
    else:
        lost(connection, graphs=True)
    if case.startswith("lost"):
        gc.collect()
        free = torch.cuda.mem_get_info()[0]
        del connection
        gc.collect()
        assert torch.cuda.mem_get_info()[0] - free >= peer_kernel.MEMORY_BYTES, "memory was not given back"
    else:
        connection.all_gather(torch.zeros(1, device=device)).cpu()  # nobody ends while another still reads
    print("done")


main()

"""The small sums of a decode step over GPUs of one machine: NCCL against one kernel over the others' memories.

    python3 bench/allreduce.py [--ranks 2] [--rows 1 8 64 256] [--widths 4096 5120] [--calls 100]

Microseconds for each sum of rows x width numbers in bfloat16, in a CUDA graph of ``--calls`` sums one after another:
the median over replays, of the slowest rank. The gate comes first: the kernel's sums are those of float32 in the order
of ranks, bit for bit. GB/s is what a rank reads of the others' memories. The last line is JSON; from it follows
``MOST_BYTES`` of nanovllm/parallel/peer.py: the kernel takes what it does faster.
"""

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import clone  # noqa: F401
import torch
from torch import Tensor

from nanovllm.parallel.communicator import NCCL, new_identity
from nanovllm.parallel.peer import OneShot, one_shot


def gate(connection: OneShot, count: int) -> None:
    """Raise AssertionError unless sums are exact, as often as halves of the memory are used again."""
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        pieces = torch.randn(connection.size, count, generator=generator, device="cuda").bfloat16()
        expected = pieces[0].float()
        for piece in pieces[1:]:
            expected = expected + piece.float()
        found = connection.all_reduce(pieces[connection.rank].clone())
        assert torch.equal(found, expected.bfloat16()), f"a sum of {count} numbers is wrong"


def microseconds(connection: Any, x: Tensor, calls: int, replays: int = 20) -> float:
    """Return what one sum takes."""
    x.zero_()
    connection.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for _ in range(calls):
            connection.all_reduce(x)
    times = []
    for _ in range(replays):
        connection.all_gather(torch.zeros(1, device="cuda")).cpu()  # all begin together
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / calls)
    mine = torch.tensor([statistics.median(times[3:])], device="cuda")
    return float(connection.all_gather(mine).max())


def measure(arguments: argparse.Namespace) -> None:
    """Time both, as one rank of several; rank 0 prints."""
    from nanovllm.parallel.peer_kernel import ELEMENTS

    rank, size = arguments.rank, arguments.ranks
    torch.cuda.set_device(rank)
    nccl = NCCL(bytes.fromhex(arguments.identity), rank, size, torch.device("cuda", rank))
    connection = one_shot(nccl, torch.device("cuda", rank))
    if not isinstance(connection, OneShot):
        sys.exit("these devices do not reach each other's memory")
    connection.most_bytes = 2 * ELEMENTS
    results = []
    for width in arguments.widths:
        for rows in arguments.rows:
            x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
            gate(connection, x.numel())
            took = {
                name: microseconds(each, x, arguments.calls)
                for name, each in (("nccl", nccl), ("one_shot", connection))
            }
            found = dict(rows=rows, width=width, bytes=x.nbytes, **took, ratio=took["nccl"] / took["one_shot"])
            results.append(found)
            if not rank:
                speed = x.nbytes * (size - 1) / took["one_shot"] / 1e3
                print(
                    f"{rows:4d} x {width:5d} {x.nbytes / 1024:8.0f} KB   NCCL {took['nccl']:8.2f} us   "
                    f"one-shot {took['one_shot']:8.2f} us {speed:7.1f} GB/s   x {found['ratio']:.2f}",
                    flush=True,
                )
    if not rank:
        about = dict(device=torch.cuda.get_device_name(), ranks=size, calls=arguments.calls, torch=torch.__version__)
        print(json.dumps(dict(bench="allreduce", **about, results=results)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 5120])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--identity", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments)
        return 0
    if torch.cuda.device_count() < arguments.ranks:
        print(f"--ranks is {arguments.ranks}, and there are {torch.cuda.device_count()} CUDA devices", file=sys.stderr)
        return 2
    command = [sys.executable, *sys.argv, f"--identity={new_identity().hex()}"]
    ranks = [subprocess.Popen([*command, f"--rank={rank}"]) for rank in range(arguments.ranks)]
    failed = 0
    try:
        while not failed and any(rank.poll() is None for rank in ranks):
            failed = next((rank.returncode for rank in ranks if rank.poll()), 0)
            for rank in ranks:
                try:
                    rank.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        return failed or max(abs(rank.returncode) for rank in ranks)
    finally:
        for rank in ranks:  # one that is left would wait for the lost one for ever
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    sys.exit(main())

"""What the benchmarks of kernels share: how a figure is taken, and the roof it is measured against."""

import statistics
from collections.abc import Callable

import clone  # noqa: F401
import torch
from torch import Tensor

COPY_BYTES = 4 * 2**30


def copy_bandwidth() -> float:
    """Return bytes a second, read plus written, of the fastest copy of 4 GiB: the driver's, or a plain kernel's.

    Not in a CUDA graph: there the driver leaves a copy to the device's copy engines, which are slower than its
    processors. At this size (2 ms on the fastest devices) the launch does not count.
    """
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
    return 2 * COPY_BYTES / min(map(_seconds, copies))


def microseconds(call: Callable[[], object], flush: Tensor, replays: int = 15) -> float:
    """Return the median over replays of a CUDA graph of ``call``, between which ``flush`` overwrites the L2 cache.

    ``call`` has run before, so that its kernels are compiled, and returns what it made: held while the graph lives, or
    the next tensor in it would have the same place.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    times = []
    for _ in range(replays):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    del made
    return statistics.median(times[3:])


def _seconds(call: Callable[[], object]) -> float:
    """Return the median of several calls, after two that do not count."""
    took = []
    for _ in range(11):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        took.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(took[2:])

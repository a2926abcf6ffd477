"""What the benchmarks of kernels share: the roof that figures are measured against."""

import statistics
from collections.abc import Callable

import torch

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

"""Kernels that start before the one in front of them has ended (programmatic dependent launch, Hopper and newer).

Between two kernels of a decode step a GPU does nothing for a microsecond or two: the first drains, the next is set up.
Launched with ``launch_options``, the next one is set up meanwhile, and reads what never changes, its weights:

    kernel before   [ release | weights | wait | work ]
    this one             [ release | weights  . . . . .  | wait | work ]

Rules for a kernel that is launched so; each of its programs keeps them:

- Before ``wait`` it reads constants alone: weights, tables, what was there before the step, or in a recorded step the
  message that its first kernel gets (the second, ``take_tokens``, is no such kernel). It writes nothing at all.
  An earlier kernel may still be writing what this one reads, and may still be reading what this one writes: the
  allocator hands a buffer to the next tensor as soon as the host has let go of the last.
- It waits, whatever it does and even if it has nothing to do: who waits for this kernel relies on all before it.
- Weights are final before the first such launch: whoever has written one synchronizes once (``few_rows``).

``wait`` returns when the kernel before has ended and what it wrote can be read. That one had waited too, so all
kernels before have ended. A kernel without the launch option, a copy or a host function is a barrier as ever, on both
sides. Nothing that is read or written depends on the timing, so every ``OVERLAP`` gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

OVERLAP = 2
"""When the next kernel may start: 0 at this one's end, 1 when this one has what it waits for, 2 at once."""


def launch_options(tensor: Tensor) -> dict[str, int]:
    """Return keywords for a launch on this tensor's GPU: the kernel's own ``WAITS``, and what lets it start early.

    ``WAITS`` is ``OVERLAP`` where the GPU and Triton can do that, else 0, for which nothing is compiled.
    """
    if OVERLAP and tensor.is_cuda and _can_overlap(tensor.get_device()):
        return {"WAITS": OVERLAP, "launch_pdl": True}
    return {"WAITS": 0}


@triton.jit  # type: ignore[untyped-decorator]
def release(WAITS: tl.constexpr) -> None:
    """Let the next kernel start as soon as all programs are here; the first line of a kernel."""
    if WAITS == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait(WAITS: tl.constexpr) -> None:
    """Wait until what the kernels before have written can be read and what they read may be written."""
    if WAITS:
        tl.extra.cuda.gdc_wait()
    if WAITS == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def fetch(addresses) -> None:  # type: ignore[no-untyped-def]
    """Ask for the cache lines at int64 addresses to be brought to the L2 cache, and go on: a reading like any other."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


def _can_overlap(device: int) -> bool:
    if torch.version.hip is not None or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)

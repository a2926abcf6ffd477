"""Whether Triton kernels can run; asked by the front doors of operations, so that nobody else has to."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

TRITON = find_spec("triton") is not None
"""Looked for, not imported: a CPU never pays for it."""

LOWEST_CAPABILITY = (8, 0)
"""Of a GPU that Triton is made for, and that has the shared memory our tiles take."""

FUSED: dict[str, bool] = {"enable_fp_fusion": True}
"""For each launch: a product and a sum may be one instruction. Triton 3.9 warns where nobody says so, for 3.10 will
change what that means."""


def kernels_run_on(*tensors: Tensor) -> bool:
    """Whether a kernel can take all of these: on such a GPU, of one type of 16 or 32 bits, each row in one piece."""
    first = tensors[0]
    if not (TRITON and first.is_cuda and first.dtype in (torch.bfloat16, torch.float16, torch.float32)):
        return False
    if not _able(first.get_device()):
        return False
    return all(tensor.dtype is first.dtype and tensor.stride(-1) == 1 for tensor in tensors)


@cache
def _able(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= LOWEST_CAPABILITY

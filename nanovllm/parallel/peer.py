"""Small sums over the GPUs of one machine by a kernel of our own: NCCL takes longer for them than they are worth.

    a rank's memory     its numbers, and who has come      mapped by all others (CUDA IPC)
    all_reduce          copy, say so, wait for the others, read and add up theirs: one kernel (``peer_kernel``)

Known as one-shot all-reduce, from TensorRT-LLM and vLLM. Every rank reads what all others have, so it is for few bytes;
what is larger or of another type goes through NCCL, as do gathered pieces.
"""

import ctypes
import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nanovllm.errors import EngineError
from nanovllm.ops.kernels import TRITON
from nanovllm.parallel.communicator import NCCL, Connection

logger = logging.getLogger(__name__)

MOST_BYTES = 5 * 2**19
"""Most that a rank reads of the others' memories for a sum; what is larger is left to NCCL. 256 rows of 5,120 numbers
between two GPUs, the largest sum of bench/allreduce.py: the kernel takes a third of NCCL's time."""

DTYPES = (torch.bfloat16, torch.float16)
"""Of one width: what a program of the kernel writes must not depend on the type."""

RELEASE = 2**62
"""More arrivals than there will be."""

HANDLE_BYTES = 64
PEER_ACCESS, PEER_ATOMICS = 2, 3
"""``CUdevice_P2PAttribute`` of cuda.h. Over PCIe there is no access or there are no atomics, and NCCL is as good."""
LAZY_PEER_ACCESS = 1
GRANULE_BYTES = 2**21
"""A smaller piece is cut from a larger one, and then others would map that one."""


class OneShot(Connection):
    """NCCL, but for small sums. Every sum is made in the order of ranks, in float32: the same bits on all of them.

    ``memories``: where each rank's memory is on this one's device; given back when this object goes.
    """

    def __init__(self, below: NCCL, device: torch.device, memories: Mapping[int, int]) -> None:
        from nanovllm.parallel.peer_kernel import PROGRAMS

        self.rank, self.size = below.rank, below.size
        self.most_bytes = MOST_BYTES // (below.size - 1)
        self._below = below
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)  # where waiting kernels look
        self._calls = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        places = [*(memories[rank] for rank in range(self.size)), self._word.data_ptr()]
        self._addresses = torch.tensor(places, device=device)  # waits for the zeros too
        # not in ``close``: a step that is just being submitted may still write there
        weakref.finalize(self, _give_back, device, memories, self.rank, self._word).atexit = False

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        return self._add_up(x, None) if self._takes(x) else self._below.all_reduce(x)

    def plus(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``Communicator``. The kernel adds the residual on its way: one that the norm behind need not write."""
        if self._takes(x) and residual.dtype is x.dtype:
            return self._add_up(x, residual.contiguous()), None
        return self._below.plus(x, residual)

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        return self._below.all_gather(x)

    def _takes(self, x: Tensor) -> bool:
        return x.dtype in DTYPES and 0 < x.nbytes <= self.most_bytes

    def _add_up(self, x: Tensor, residual: Tensor | None) -> Tensor:
        from nanovllm.parallel.peer_kernel import all_reduce

        x = x.contiguous()
        all_reduce(x, residual, self._addresses, self._calls, self.rank, self.size)
        return x

    def close(self) -> None:
        """See ``Connection``. What kernels give that have waited in vain is no sum, and nobody may use it.

        No call of CUDA comes before they are free: one might wait for them.
        """
        ctypes.c_int64.from_address(self._word.data_ptr()).value = RELEASE
        self._below.close()


def one_shot(below: NCCL, device: torch.device) -> Connection:
    """Return a communicator that makes small sums faster; on all ranks ``below`` where one of them cannot."""
    memories: dict[int, int] = {}
    obstacle, handle = "", bytes(HANDLE_BYTES)
    with torch.cuda.device(device):
        try:
            handle = _offer(memories, below.rank)
        except EngineError as error:
            obstacle = str(error)
        words = torch.tensor([device.index, *memoryview(handle).cast("i")], dtype=torch.int32, device=device)
        told = below.all_gather(words).cpu()
        try:
            if not obstacle:
                _map(memories, below.rank, told)
        except EngineError as error:
            obstacle = str(error)
        failed = below.all_gather(torch.tensor([bool(obstacle)], dtype=torch.int32, device=device)).any()
        if failed:
            own = memories.pop(below.rank, None)
            _give_back(device, memories, below.rank)
            below.all_gather(words).cpu()  # nobody has it mapped any more
            _give_back(device, {} if own is None else {below.rank: own}, below.rank)
            logger.warning("rank %d leaves all sums to NCCL: %s", below.rank, obstacle or "another rank has to")
            return below
        logger.info("small sums by one kernel over %d GPUs' memories", below.size)
        return OneShot(below, device, memories)


def _offer(memories: dict[int, int], own: int) -> bytes:
    """Allocate this rank's memory, filled with zeros; return what others map it with."""
    if not TRITON:
        raise EngineError("Triton is not installed.")
    from nanovllm.parallel.peer_kernel import MEMORY_BYTES

    address, handle = ctypes.c_uint64(), _Handle()
    size = ctypes.c_size_t(-(-MEMORY_BYTES // GRANULE_BYTES) * GRANULE_BYTES)
    _driver("cuMemAlloc_v2", ctypes.byref(address), size)
    memories[own] = address.value
    _driver("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
    _driver("cuCtxSynchronize")  # before anybody adds to the counters
    _driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle)


def _map(memories: dict[int, int], own: int, told: Tensor) -> None:
    """Map the others' memories. ``told`` int32 [ranks, 17]: each rank's device and handle."""
    devices = told[:, 0].tolist()
    for rank, device in enumerate(devices):
        if rank == own:
            continue
        for attribute, what in ((PEER_ACCESS, "access"), (PEER_ATOMICS, "atomics")):
            found = ctypes.c_int()
            _driver("cuDeviceGetP2PAttribute", ctypes.byref(found), attribute, devices[own], device)
            if not found.value:
                raise EngineError(f"device {devices[own]} has no {what} in the memory of device {device}.")
        address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(told[rank, 1:].numpy().tobytes())
        _driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, LAZY_PEER_ACCESS)
        memories[rank] = address.value


def _give_back(device: torch.device, memories: Mapping[int, int], own: int, *held: object) -> None:
    """Unmap and free, once the kernels that use it have ended; what is ``held`` lives until then."""
    # a device that is lost has nothing to give back
    with suppress(EngineError, RuntimeError), torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # makes its context that of this thread, which may be a new one
        for rank, address in memories.items():
            _driver("cuMemFree_v2" if rank == own else "cuIpcCloseMemHandle", ctypes.c_uint64(address))


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


def _driver(name: str, *arguments: Any) -> None:
    """Call CUDA's driver, for it has one name for all versions and, unlike the runtime, keeps no last error that
    torch would find.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EngineError(f"CUDA's driver cannot be loaded ({error}).") from error
    status = getattr(library, name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        raise EngineError(f"{name} failed: {(text.value or b'error %d' % status).decode()}.")

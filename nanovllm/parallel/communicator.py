"""What layers know of other ranks: sums and gathered pieces. Gloo on CPUs, NCCL on GPUs."""

import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from nanovllm.errors import EngineError

PATIENCE = timedelta(minutes=2)
"""For gloo's waits. A rank that is lost is noticed by the guard within seconds, and its connections then break."""

CLOSE_SECONDS = 2.0

NCCL_TYPES = {
    torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9
}  # fmt: skip
"""``ncclDataType_t`` of nccl.h."""
NCCL_SUM = 0
NCCL_ID_BYTES = 128


class Communicator(Protocol):
    """The ranks that hold one model. Every rank calls the same methods in the same order with the same shapes."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, the same bits on every rank; ``x`` may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' ``x`` [*shape], in their order: [size, *shape]."""

    def plus(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return two summands for the norm behind, (``all_reduce``, the residual), or (their sum, None).

        On all ranks the same; ``x`` may be overwritten.
        """
        return self.all_reduce(x), residual


class Connection(Communicator, Protocol):
    """A communicator that can be ended."""

    def close(self) -> None:
        """Let go of the other ranks; a wait for them, in any thread, ends. A second call does nothing."""


class Gloo(Connection):
    """Between processes of one machine, over the loopback. ``path`` is a file that does not exist yet.

    Raises RuntimeError from every call once another rank is gone.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        dist: Any = torch.distributed  # its stubs know nothing of what follows
        options = dist.ProcessGroupGloo._Options()
        options._timeout = PATIENCE
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group: Any = dist.ProcessGroupGloo(dist.FileStore(str(path), size), rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        out = x.new_empty(self.size, *x.shape)
        self._group.allgather([list(out.unbind())], [x.contiguous()]).wait()
        return out

    def close(self) -> None:
        """See ``Connection``. Later calls fail; one under way in another thread ends with the other ranks."""
        self._group = None


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * NCCL_ID_BYTES),)


class NCCL(Connection):
    """Between GPUs, on the current stream: calls return at once, and a CUDA graph can hold them.

    The library is called directly, as in vLLM's ``pynccl``: torch's process groups come with a watchdog that may end
    the user's process when another one dies. ``identity`` comes from ``new_identity`` on rank 0.
    """

    def __init__(self, identity: bytes, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._library = _library()
        self._comm = ctypes.c_void_p()
        self._closing = threading.Lock()
        self._closed = False
        with torch.cuda.device(device):
            self._call("ncclCommInitRank", ctypes.byref(self._comm), size, _Id.from_buffer_copy(identity), rank)
            self.all_reduce(torch.zeros(1, device=device))  # now, for a graph must not be the first to connect
            torch.cuda.synchronize(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        x = x.contiguous()
        self._collect("ncclAllReduce", x, x, NCCL_SUM)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Communicator``."""
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        self._collect("ncclAllGather", x, out)
        return out

    def close(self) -> None:
        """See ``Connection``. Kernels that wait for another rank end; graphs that hold some must be gone."""
        with self._closing:
            closed, self._closed = self._closed, True
        if not closed:  # NCCL waits for graphs, and nobody should wait for it
            ending = threading.Thread(target=self._library.ncclCommAbort, args=(self._comm,), daemon=True)
            ending.start()
            ending.join(CLOSE_SECONDS)

    def _collect(self, name: str, x: Tensor, out: Tensor, *operation: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        addresses = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        self._call(name, *addresses, ctypes.c_size_t(x.numel()), NCCL_TYPES[x.dtype], *operation, self._comm, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        _checked(self._library, name, *arguments)


def new_identity() -> bytes:
    """Return what all ranks of one ``NCCL`` must be given."""
    identity = _Id()
    _checked(_library(), "ncclGetUniqueId", ctypes.byref(identity))
    return bytes(identity)


def _library() -> Any:
    """Return the NCCL that torch brings, and has loaded."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise EngineError(
            f"NCCL cannot be loaded ({error}); several GPUs need it. torch's CUDA wheels bring it."
        ) from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _checked(library: Any, name: str, *arguments: Any) -> None:
    function: Callable[..., int] = getattr(library, name)
    status = function(*arguments)
    if status:
        raise EngineError(f"{name} failed: {library.ncclGetErrorString(status).decode()}.")

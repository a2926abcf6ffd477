"""``compile=True``: what stands around the products of matrices is compiled by PyTorch instead of written by hand.

    residual + x -> norm -> product -> (gate)      one function for each shape of weight, through ``torch.compile``
    rotation, cache, attention, head, sampler      as ever

PyTorch's compiler (Ansel et al. 2024, ASPLOS, "PyTorch 2") fuses what it can and leaves products to its library. What
it makes takes the place of ``ops.linear``'s kernels, so that the two can be compared. All of it is compiled when the
engine is built: nothing is when a CUDA graph is recorded.
"""

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError
from nanovllm.layers.linear import Linear
from nanovllm.model_runner import ModelRunner
from nanovllm.ops.activation import ACTIVATIONS
from nanovllm.ops.kernels import TRITON
from nanovllm.ops.linear import Product
from nanovllm.request import Request
from nanovllm.sampling_params import SamplingParams
from nanovllm.scheduler import SchedulerOutput, Span

CXX = {"darwin": "clang++", "win32": "cl"}
"""Platform -> the C++ compiler that PyTorch looks for unless CXX names another; g++ on all others."""

REASON_CHARS = 200
"""Most that is shown of what the compiler says."""


def prepare(model: torch.nn.Module, device: torch.device, config: EngineConfig) -> None:
    """Let the linear layers of a model that has no weights yet compute through compiled functions.

    They hold their weights in the type that is computed in. Raises ConfigError where that cannot work.
    """
    if config.enforce_eager:
        _refuse("must be False with enforce_eager=True, which asks for neither graphs nor compilation")
    if config.deterministic:
        _refuse("must be False with deterministic=True: PyTorch's products are chosen by the size of a step")
    if device.type == "cuda" and not TRITON:
        _refuse("needs Triton on a GPU, which cannot be imported here; pip install triton")
    compiler = os.environ.get("CXX") or CXX.get(sys.platform, "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        _refuse(f"needs a C++ compiler on a CPU, and {compiler!r} is not found; install it (on Debian: apt install "
                "g++), or name one with the environment variable CXX")  # fmt: skip
    functions = Functions()
    for module in model.modules():
        if isinstance(module, Linear):
            module.make_product = partial(CompiledProduct, functions)


@torch.inference_mode()
def warm_up(runner: ModelRunner, max_requests: int) -> None:
    """Compile everything that steps will call: for several rows, however many, and for a single one.

    Of three requests two draw, if so many may: the last layer goes on with these, and a step in which all draw would be
    recorded.

    Takes a minute for the first model of a machine, and seconds once PyTorch's cache on disk knows it. Writes to the
    first slot of the cache, which nobody reads. Raises ConfigError if the compiler fails.
    """
    for rows, drawing in ((3, min(2, max_requests)), (1, 0)):
        spans = []
        for place in range(rows):
            request = Request(
                request_id="", prompt_token_ids=[0], params=SamplingParams(), max_tokens=1, arrival=place, block_ids=[0]
            )
            spans.append(Span(request, 0, 1, place < drawing))
        try:
            runner.submit(SchedulerOutput(tuple(spans)))()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:REASON_CHARS]
            raise ConfigError(
                f"compile is True, and PyTorch's compiler fails here ({type(error).__name__}: {reason}). It needs a "
                "C++ compiler and Python's headers (on Debian: apt install g++ python3-dev); or leave compile=False.",
                parameter="compile", value=True,
            ) from error  # fmt: skip


class Functions:
    """The compiled functions of one engine, by what they are compiled for.

    PyTorch keeps what it has compiled with the code of a function, counts the shapes it has seen there and gives up
    after some. So each entry has a code of its own, and goes with the engine.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Callable[..., tuple[Tensor, Tensor]]] = {}

    def find(self, weight: Tensor, bias: Tensor | None, activation: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return ``surrounded``, compiled for such a weight and any number of rows."""
        key = (weight.shape, weight.dtype, bias is None, activation)
        if key not in self._made:
            code = surrounded.__code__.replace(co_name="_".join(map(str, (*weight.shape, activation))))
            own = FunctionType(code, surrounded.__globals__, code.co_name)
            self._made[key] = torch.compile(own, fullgraph=True, dynamic=False)
        return self._made[key]


class CompiledProduct(Product):
    """A product of which everything but the bare product is compiled."""

    def __init__(
        self, functions: Functions, weight: Tensor, bias: Tensor | None, storage: torch.dtype, *, deterministic: bool
    ) -> None:
        weight = weight.contiguous()
        self._functions, self._weight, self._bias = functions, weight, bias
        super().__init__(partial(F.linear, weight=weight, bias=bias), lambda: (weight, bias))

    def after_norm(self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See ``ops.linear.reference.norm_linear``."""
        return self._call(x, residual, norm_weight, eps, None)

    def gated_after_norm(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, activation: str
    ) -> tuple[Tensor, Tensor]:
        """See ``ops.linear.reference.norm_gated``."""
        return self._call(x, residual, norm_weight, eps, activation)

    def _call(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, activation: str | None
    ) -> tuple[Tensor, Tensor]:
        function = self._functions.find(self._weight, self._bias, activation)
        for rows in (x,) if residual is None else (x, residual):
            if rows.shape[0] > 1:  # one row is compiled apart
                torch._dynamo.mark_dynamic(rows, 0)
        out, total = function(x, residual, norm_weight, eps, self._weight, self._bias, activation)
        return out, x if residual is None else total


def surrounded(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """``ops.linear.reference.norm_linear``, or ``norm_gated`` with an activation, in one piece for the compiler."""
    total = x if residual is None else x + residual
    wide = total if total.dtype is torch.float64 else total.float()
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    out = F.linear((wide * scale).to(x.dtype) * norm_weight, weight, bias)
    if activation is not None:
        gate, up = out.chunk(2, dim=-1)
        out = ACTIVATIONS[activation](gate) * up
    return out, total


def _refuse(rule: str) -> NoReturn:
    raise ConfigError(f"compile is True; it {rule}.", parameter="compile", value=True)

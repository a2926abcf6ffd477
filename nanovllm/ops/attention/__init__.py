"""Paged attention: the front door, and the table of backends.

A backend is a module with ``PREFERRED_BLOCK_SIZE``, ``plan(...)``, called once a step, and ``attend(...)``, called by
each layer with that plan. ``reference.attend`` says what the result must be.
"""

import logging
from importlib import import_module
from types import ModuleType

import torch

from nanovllm.errors import ConfigError

BACKENDS = {"sdpa": "nanovllm.ops.attention.sdpa", "triton": "nanovllm.ops.attention.paged"}
"""Name -> module."""

logger = logging.getLogger(__name__)


def find_backend(name: str, device_type: str) -> ModuleType:
    """Return the backend called ``name``, or for "auto" the best one for a kind of device."""
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}; it must be 'auto' or one of {', '.join(BACKENDS)}.",
            parameter="attention_backend", value=name,
        )  # fmt: skip
    if name == "auto" and device_type != "cuda":
        chosen, why = "sdpa", f"the device is a {device_type}"
    elif name == "auto":
        obstacle = _obstacle(device_type)
        chosen, why = ("sdpa", obstacle) if obstacle else ("triton", "its kernels run on this device")
    else:
        chosen, why = name, "as asked"
        if name == "triton" and (obstacle := _obstacle(device_type)):
            raise ConfigError(
                f"attention_backend is 'triton', but {obstacle}; use 'auto' or 'sdpa'.",
                parameter="attention_backend", value=name,
            )  # fmt: skip
    logger.info("attention backend: %s (%s)", chosen, why)
    return import_module(BACKENDS[chosen])


def _obstacle(device_type: str) -> str:
    """Say why Triton cannot be used; empty if it can."""
    if device_type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        major, minor = torch.cuda.get_device_capability()
        return f"this device has compute capability {major}.{minor}, below 8.0"
    try:
        triton = import_module("triton")
    except ImportError:
        return "triton is not installed"
    if device_type == "cuda" or triton.knobs.runtime.interpret:
        return ""
    return f"its kernels do not run on a device of type {device_type}"

"""Paged attention: the front door, and the table of backends.

A backend is a module with ``PREFERRED_BLOCK_SIZE``, ``plan(...)``, called once a step, and ``attend(...)``, called by
each layer with that plan. ``reference.attend`` says what the result must be. It may write behind a request's last
token, in the block that holds it. One that cannot serve every model and
cache has ``check(head_dim, block_size, dtype)`` too: what stands in the way, or nothing. One whose results can be made
independent of the step, by telling ``plan`` where prompts end, says ``DETERMINISTIC = True``. One that can be recorded
in a CUDA graph has ``graph_plan``, and what ``cuda_graphs`` asks of it; ``attend_fresh`` then does what lies between
projection and attention too, for the plans of which ``attends_fresh`` says so.
"""

import logging
from importlib import import_module
from types import ModuleType

import torch

from nanovllm.errors import ConfigError

BACKENDS = {
    "triton": "nanovllm.ops.attention.paged",
    "flash_attn": "nanovllm.ops.attention.flash",
    "flash_attn_3": "nanovllm.ops.attention.flash3",
    "sdpa": "nanovllm.ops.attention.sdpa",
}
"""Name -> module."""

AUTO = {"cuda": ("triton", "sdpa")}
"""Kind of device -> what "auto" tries, in this order; "sdpa" on all others."""

NEEDS = {
    "triton": ("triton", (8, 0), None),
    "flash_attn": ("flash_attn", (8, 0), None),
    "flash_attn_3": ("flash_attn_interface", (9, 0), (9, 0)),
}
"""Name -> the library's module, the lowest and the highest compute capability it is made for."""

logger = logging.getLogger(__name__)


def find_backend(name: str, device_type: str, facts: tuple[int, int | None, torch.dtype] | None = None) -> ModuleType:
    """Return the backend called ``name``, or for "auto" the best one that can work.

    ``facts`` are head_dim, block_size (None: the backend's own) and dtype; without them only the machine counts.
    Raises ConfigError for a name that is unknown or cannot work here.
    """
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}; it must be 'auto' or one of {', '.join(BACKENDS)}.",
            parameter="attention_backend", value=name,
        )  # fmt: skip
    why = "as asked"
    if name == "auto":
        why = "its kernels run on this device" if device_type in AUTO else f"the device is a {device_type}"
    for candidate in AUTO.get(device_type, ("sdpa",)) if name == "auto" else (name,):
        obstacle = _obstacle(candidate, device_type)
        if not obstacle:
            backend = import_module(BACKENDS[candidate])
            if facts is not None and hasattr(backend, "check"):
                head_dim, block_size, dtype = facts
                obstacle = backend.check(head_dim, block_size or backend.PREFERRED_BLOCK_SIZE, dtype)
        if not obstacle:
            logger.info("attention backend: %s (%s)", candidate, why)
            return backend
        why = obstacle
    raise ConfigError(
        f"attention_backend is {name!r}, but {why}; use 'auto' or 'sdpa'.",
        parameter="attention_backend", value=name,
    )  # fmt: skip


def _obstacle(name: str, device_type: str) -> str:
    """Say what keeps a backend from running on this machine; empty if nothing does."""
    if name not in NEEDS:
        return ""
    library, lowest, highest = NEEDS[name]
    if device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < lowest or (highest is not None and capability > highest):
            needed = "{}.{}".format(*lowest) + (" or above" if highest is None else "")
            return "this device has compute capability {}.{}, and {} needs {}".format(*capability, name, needed)
    elif name != "triton":
        return f"{name} needs a CUDA device, and this one is a {device_type}"
    try:
        module = import_module(library)
        import_module(BACKENDS[name])
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
        if isinstance(error, ModuleNotFoundError) and error.name in (None, library):
            return f"{library} is not installed"
        return f"{library} cannot be imported ({str(error).partition(chr(10))[0]})"
    if device_type == "cuda" or module.knobs.runtime.interpret:
        return ""
    return f"its kernels do not run on a device of type {device_type}"

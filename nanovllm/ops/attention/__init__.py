"""Paged attention: the front door, and the table of backends.

A backend is a module with ``PREFERRED_BLOCK_SIZE``, ``plan(...)``, called once a step, and ``attend(...)``, called by
each layer with that plan. ``reference.attend`` says what the result must be.
"""

from importlib import import_module
from types import ModuleType

from nanovllm.errors import ConfigError

BACKENDS = {"sdpa": "nanovllm.ops.attention.sdpa"}
"""Name -> module."""


def find_backend(name: str, device_type: str) -> ModuleType:
    """Return the backend called ``name``, or for "auto" the best one for a kind of device."""
    chosen = "sdpa" if name == "auto" else name
    if chosen not in BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}; it must be 'auto' or one of {', '.join(BACKENDS)}.",
            parameter="attention_backend", value=name,
        )  # fmt: skip
    return import_module(BACKENDS[chosen])

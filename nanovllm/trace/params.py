"""Sampling parameters as a recording holds them."""

from dataclasses import fields
from enum import Enum
from typing import Any

from nanovllm.sampling_params import SamplingParams

MOST_ITEMS = 64
"""Longest list of a parameter that is written down."""

USUAL = [
    (each.name, [] if each.name in ("stop", "stop_token_ids", "bad_words") else each.default)
    for each in fields(SamplingParams)
]
"""What parameters are if nobody says anything."""


def told(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults, as JSON can hold them."""
    return {name: plain(value) for name, usual in USUAL if (value := getattr(params, name)) != usual}


def plain(value: Any) -> Any:
    """Return a parameter as JSON can hold it, and not longer than a few lines."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, dict)) and len(value) > MOST_ITEMS:
        return f"{len(value)} items"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return repr(value)[:1000]

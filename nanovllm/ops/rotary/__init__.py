"""Rotary position embedding."""

from nanovllm.ops.rotary.reference import rotate

__all__ = ["rotate"]

"""RMS normalisation, alone and behind the addition of a residual."""

from nanovllm.ops.rms_norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]

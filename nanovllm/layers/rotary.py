"""Which angle each position and channel pair is turned by, with the ways to stretch it to longer contexts.

The formulas are those of transformers' ``modeling_rope_utils``; papers are named at each function.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nanovllm.config import RopeConfig
from nanovllm.errors import CheckpointError
from nanovllm.ops.look_up import look_up

Angles = tuple[Float[Tensor, "tokens 1 head_dim"], Float[Tensor, "tokens 1 head_dim"]]
"""Cosines and signed sines, as ``ops.rotary`` wants them."""


class Rotary:
    """Positions to cosines and sines. Holds the frequency of each channel pair, in float32.

    ``max_model_len`` matters for "dynamic" alone: its base follows the longest context that the engine allows,
    not the longest request in the batch, for a request's output must not depend on its neighbours.
    """

    def __init__(self, config: RopeConfig, head_dim: int, max_positions: int, max_model_len: int) -> None:
        if config.kind not in KINDS:
            raise CheckpointError(f"rope type is {config.kind!r}; known are {', '.join(sorted(KINDS))}.")
        try:
            frequencies, self.scale = KINDS[config.kind](config, head_dim, max_positions, max_model_len)
        except KeyError as missing:
            raise CheckpointError(f"rope type {config.kind!r} needs {missing} in rope_scaling.") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(
                f"rope_scaling is {dict(config.settings)}, which is no {config.kind!r}: {error}."
            ) from error
        if not bool(frequencies.isfinite().all()):
            raise CheckpointError(
                f"rope_scaling is {dict(config.settings)}, which gives {config.kind!r} no finite angles."
            )
        self.frequencies: Float[Tensor, " pairs"] = frequencies
        self._max_model_len = max_model_len
        self._table: Float[Tensor, "positions two head_dim"] | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move to a device. On a GPU the angles of every position are worked out now: a step then looks them up."""
        self.frequencies = self.frequencies.to(device)
        if device.type == "cuda":
            positions = torch.arange(self._max_model_len, device=device)
            self._table = torch.cat(self.angles(positions, dtype), dim=1)

    def angles(self, positions: Int64[Tensor, " tokens"], dtype: torch.dtype) -> Angles:
        """Return the cosines and sines of a step; computed in float32, once for all layers."""
        if self._table is not None and self._table.dtype is dtype:
            found = look_up(self._table, positions)
            return found[:, :1], found[:, 1:]
        turns = positions[:, None, None].float() * self.frequencies
        cos, sin = turns.cos() * self.scale, turns.sin() * self.scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


Frequencies = tuple[Tensor, float]
"""Radians for one position, for each channel pair; and a factor on cosine and sine."""


def _powers(theta: float, head_dim: int) -> Tensor:
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float()
    return 1.0 / theta ** (steps / head_dim)


def _default(rope: RopeConfig, head_dim: int, max_positions: int, max_model_len: int) -> Frequencies:
    return _powers(rope.theta, head_dim), 1.0


def _linear(rope: RopeConfig, head_dim: int, max_positions: int, max_model_len: int) -> Frequencies:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595)."""
    return _powers(rope.theta, head_dim) / rope.settings["factor"], 1.0


def _dynamic(rope: RopeConfig, head_dim: int, max_positions: int, max_model_len: int) -> Frequencies:
    """Dynamic NTK: raise the base with the context, here with the longest one allowed.

    As in transformers, the trained length is max_position_embeddings, whatever the settings call original.
    """
    factor, length = float(rope.settings["factor"]), max(max_model_len, max_positions)
    stretch = (factor * length / max_positions - (factor - 1)) ** (head_dim / (head_dim - 2))
    return _powers(rope.theta * stretch, head_dim), 1.0


def _llama3(rope: RopeConfig, head_dim: int, max_positions: int, max_model_len: int) -> Frequencies:
    """Llama 3.1: long waves are stretched, short ones kept, those between blended."""
    factor, low, high, trained = (
        rope.settings[name]
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    plain = _powers(rope.theta, head_dim)
    waves = 2 * math.pi / plain
    share = ((trained / waves - low) / (high - low)).clamp(0, 1)  # 0: stretched, 1: kept
    return (1 - share) * plain / factor + share * plain, 1.0


def _yarn(rope: RopeConfig, head_dim: int, max_positions: int, max_model_len: int) -> Frequencies:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): a ramp over channel pairs instead of wave lengths."""
    settings = rope.settings
    factor = float(settings["factor"])
    trained = settings.get("original_max_position_embeddings") or max_positions

    def pair(turns: float) -> float:
        """The channel pair that turns this often over the trained context (section 3.2)."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(float(settings.get("beta_fast") or 32)), pair(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, device="cpu").float() - low) / max(high - low, 0.001)
    plain = _powers(rope.theta, head_dim)
    share = 1 - ramp.clamp(0, 1)  # 1: kept, 0: stretched
    scale = settings.get("attention_factor")
    if scale is None:
        one, all_ = settings.get("mscale"), settings.get("mscale_all_dim")
        both = (float(one), float(all_)) if one and all_ else (1.0, 0.0)  # weight 0: a divisor of 1
        scale = _yarn_scale(factor, both[0]) / _yarn_scale(factor, both[1])
    return plain / factor * (1 - share) + plain * share, float(scale)


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _factors(rope: RopeConfig, head_dim: int, max_positions: int, max_model_len: int) -> Frequencies:
    """GGUF files store the result of a scaling as one divisor for each pair."""
    factors = torch.tensor(rope.settings["factors"], dtype=torch.float32, device="cpu")
    return _powers(rope.theta, head_dim) / factors, 1.0


KINDS: dict[str, Callable[[RopeConfig, int, int, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "frequency_factors": _factors,
}

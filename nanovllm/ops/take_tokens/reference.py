"""The token ids of a step, some of which only the device knows yet."""

import torch
from jaxtyping import Int64
from torch import Tensor


def take_tokens(sources: Int64[Tensor, " tokens"], drawn: Int64[Tensor, " rows"]) -> Int64[Tensor, " tokens"]:
    """Return each source that is a token id, 0 and above, as it is; -1 - row stands for the token ``drawn[row]``.

    Where nothing could be drawn, it is 0: its request has ended, and only nobody knows it yet.
    """
    return torch.where(sources < 0, drawn[(-1 - sources).clamp(min=0)].clamp(min=0), sources)

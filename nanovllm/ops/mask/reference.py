"""Which tokens may be drawn, as bits, onto logits."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32, Int64
from torch import Tensor


def mask_logits(
    logits: Float[Tensor, "rows vocab"], rows: Int64[Tensor, " masked"], words: Int32[Tensor, "masked width"]
) -> None:
    """Set ``logits[rows[i], token]`` to -inf, in place, unless bit ``token % 32`` of ``words[i, token // 32]`` is set.

    Tokens from 32 * width on have no bit, and are forbidden; bits beyond the vocabulary say nothing. Rows that are
    not named stay as they are. No row is named twice. No logit is NaN.
    """
    if rows.numel():
        vocab = logits.shape[1]
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
        bits = F.pad(bits.flatten(1)[:, :vocab], (0, max(0, vocab - 32 * words.shape[1])))
        most = (bits.to(logits.dtype) - 0.5) * torch.inf
        logits[rows] = torch.minimum(logits[rows], most)  # on a CPU four times as fast as to fill under a mask

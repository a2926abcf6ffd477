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
    not named stay as they are. No row is named twice.
    """
    if rows.numel():
        vocab = logits.shape[1]
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
        forbidden = bits.flatten(1)[:, :vocab] == 0
        forbidden = F.pad(forbidden, (0, vocab - forbidden.shape[1]), value=True)
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)

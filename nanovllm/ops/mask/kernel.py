"""Packed masks onto logits, in one launch."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def mask_kernel(logits, rows, words, vocab, width, logits_row, words_row, BLOCK: tl.constexpr):
    """Forbid what has no bit among ``BLOCK`` tokens of one row."""
    line = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + line.to(tl.int64) * words_row + token // 32, token // 32 < width, 0)
    forbidden = (word >> (token % 32)) & 1 == 0
    row = tl.load(rows + line)  # int64, and so is the offset: logits may have more than 2**31 numbers
    tl.store(logits + row * logits_row + token, float("-inf"), forbidden & (token < vocab))


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See ``reference.mask_logits``."""
    if rows.numel() and logits.shape[1]:
        assert logits.stride(1) == 1 and words.stride(1) == 1, "rows lie in one piece"
        grid = (rows.numel(), triton.cdiv(logits.shape[1], 4096))
        mask_kernel[grid](
            logits, rows, words, logits.shape[1], words.shape[1], logits.stride(0), words.stride(0),
            BLOCK=4096, num_warps=4,
        )  # fmt: skip

"""Token ids in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def take_tokens_kernel(sources, drawn, out, tokens, BLOCK: tl.constexpr):
    """Resolve ``BLOCK`` sources.

    Not launched early, so that it is a barrier (see ``overlap``): in a recorded step it comes behind the kernel that
    gets the step's message, and those that follow read the message before they wait.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + at, at < tokens, 0)
    found = tl.load(drawn - 1 - source, (at < tokens) & (source < 0), 0)
    tl.store(out + at, tl.where(source < 0, tl.maximum(found, 0), source), at < tokens)


def take_tokens(sources: Tensor, drawn: Tensor) -> Tensor:
    """See ``reference.take_tokens``."""
    out = torch.empty_like(sources)
    if tokens := sources.shape[0]:
        take_tokens_kernel[(triton.cdiv(tokens, 1024),)](sources, drawn, out, tokens, BLOCK=1024, num_warps=4)
    return out

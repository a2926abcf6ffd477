"""Token ids in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops.overlap import launch_options, release, wait


@triton.jit
def take_tokens_kernel(sources, drawn, out, tokens, BLOCK: tl.constexpr, WAITS: tl.constexpr):
    """Resolve ``BLOCK`` sources."""
    release(WAITS)
    wait(WAITS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + at, at < tokens, 0)
    found = tl.load(drawn - 1 - source, (at < tokens) & (source < 0), 0)
    tl.store(out + at, tl.where(source < 0, tl.maximum(found, 0), source), at < tokens)


def take_tokens(sources: Tensor, drawn: Tensor) -> Tensor:
    """See ``reference.take_tokens``."""
    out = torch.empty_like(sources)
    if tokens := sources.shape[0]:
        grid = (triton.cdiv(tokens, 1024),)
        options = launch_options(sources)
        take_tokens_kernel[grid](sources, drawn, out, tokens, BLOCK=1024, num_warps=4, **options)
    return out

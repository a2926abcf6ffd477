"""Paged attention through flash-attn 2, where that package is installed: compute capability 8.0 and above.

The scheduler gives decodes out first, so a step is cut in two, and no row changes its place:

    query   [ a b c | d d d e f f ]     a b c      one call for the decodes, whose contexts it may cut among processors
                                        d ... f    one call for the rest, e included, a decode that came late

The library chooses its cuts by the number of requests: the last bits of a decode depend on the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from nanovllm.ops.attention.packing import edges_of, rectangle, send

PREFERRED_BLOCK_SIZE = 256
"""The only one, but for its multiples."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, as the library reads it; made once, used by every layer."""

    decodes: int
    """How many requests, from the first on, have one new token each."""
    contexts: Tensor
    """Int32 [decodes]."""
    decode_table: Tensor
    """Int32 [decodes, max_blocks]."""
    query_edges: Tensor
    """Int32 [spans + 1]: where the rows of the others begin, the first of them at 0."""
    key_edges: Tensor
    """Int32 [spans + 1]: the same, if their contexts lay end to end."""
    span_table: Tensor
    """Int32 [spans, max_blocks]."""
    longest_span: int
    """Most new tokens of one of the others; 0 if there are none."""
    longest_context: int
    """Most tokens of one of the others."""


def check(head_dim: int, block_size: int, dtype: torch.dtype) -> str:
    """Say why the library cannot serve this model and cache; empty if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash_attn computes in float16 and bfloat16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > 256:
        return f"flash_attn takes head dimensions that are multiples of 8 up to 256, and this model's is {head_dim}"
    if block_size % PREFERRED_BLOCK_SIZE:
        return f"flash_attn needs a block_size that is a multiple of {PREFERRED_BLOCK_SIZE}, and it is {block_size}"
    return ""


def plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> Plan:
    """Lay out a step for the library. Arguments have one entry for each request, in the order of its rows."""
    sizes, contexts = np.asarray(query_lens, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    counts = -(-contexts // block_size)
    longer = np.flatnonzero(sizes > 1)
    cut = int(longer[0]) if len(longer) else len(sizes)
    lengths, decode_table, query_edges, key_edges, span_table = send(
        (
            contexts[:cut],
            rectangle(block_tables[:cut], counts[:cut]),
            edges_of(sizes[cut:]),
            edges_of(contexts[cut:]),
            rectangle(block_tables[cut:], counts[cut:]),
        ),
        device,
    )
    return Plan(
        decodes=cut,
        contexts=lengths,
        decode_table=decode_table,
        query_edges=query_edges,
        key_edges=key_edges,
        span_table=span_table,
        longest_span=int(sizes[cut:].max(initial=0)),
        longest_context=int(contexts[cut:].max(initial=0)),
    )


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: Plan, scale: float, window: int | None = None,
    *, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.attend``; the plan stands for its three index tensors.

    Channels must lie side by side; rows, heads and blocks may lie anywhere.
    """
    # (left, right): how many tokens before and after its own place a row sees
    sight = {"causal": True, "window_size": (-1, -1) if window is None else (window - 1, 0)}
    sight["softcap"] = softcap or 0.0
    outs: list[Tensor] = []
    if plan.decodes:
        decoded = flash_attn_with_kvcache(
            query[: plan.decodes, None], keys, values,
            cache_seqlens=plan.contexts, block_table=plan.decode_table, softmax_scale=scale, **sight,
        )  # fmt: skip
        outs.append(decoded[:, 0])
    if plan.longest_span:
        outs.append(
            flash_attn_varlen_func(
                query[plan.decodes :], keys, values,
                cu_seqlens_q=plan.query_edges, cu_seqlens_k=plan.key_edges,
                max_seqlen_q=plan.longest_span, max_seqlen_k=plan.longest_context,
                block_table=plan.span_table, softmax_scale=scale, **sight,
            )
        )  # fmt: skip
    return outs[0] if len(outs) == 1 else torch.cat(outs)

"""Paged attention through FlashAttention 3, for compute capability 9.0, where a package offers its Python module.

The library packs the query heads of a key-value head into one tile, so a step of decodes and longer spans is one call.
It chooses its cuts of the contexts by the batch: the last bits of a request depend on its company.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from flash_attn_interface import flash_attn_with_kvcache
from torch import Tensor

from nanovllm.ops.attention.packing import edges_of, rectangle, send

PREFERRED_BLOCK_SIZE = 128
"""The smallest that the library fetches with the copy engine for spans of many tokens."""

HEAD_DIMS = (64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, as the library reads it; made once, used by every layer."""

    query_edges: Tensor
    """Int32 [requests + 1]: where the rows of each request begin, and where the last ones end."""
    contexts: Tensor
    """Int32 [requests]."""
    table: Tensor
    """Int32 [requests, max_blocks]."""
    longest_span: int
    """Most new tokens of one request."""


def check(head_dim: int, block_size: int, dtype: torch.dtype) -> str:
    """Say why the library cannot serve this model and cache; empty if it can. Any block size will do."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash_attn_3 computes in float16 and bfloat16, and dtype is {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"flash_attn_3 takes head dimensions {', '.join(map(str, HEAD_DIMS))}, and this model's is {head_dim}"
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
    table = rectangle(block_tables, -(-contexts // block_size))
    query_edges, lengths, blocks = send((edges_of(sizes), contexts, table), device)
    return Plan(query_edges, lengths, blocks, longest_span=int(sizes.max()))


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: Plan, scale: float, window: int | None = None,
    *, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """See ``reference.attend``; the plan stands for its three index tensors.

    Channels must lie side by side; rows, heads and blocks may lie anywhere.
    """
    out: Tensor = flash_attn_with_kvcache(
        query, keys, values,
        cache_seqlens=plan.contexts, page_table=plan.table,
        cu_seqlens_q=plan.query_edges, max_seqlen_q=plan.longest_span,
        softmax_scale=scale, causal=True,
        # (left, right): how many tokens before and after its own place a row sees
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )  # fmt: skip
    return out

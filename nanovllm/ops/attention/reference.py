"""What paged attention means: the whole of it, in plain PyTorch, one request after another."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def attend(
    query: Float[Tensor, "tokens heads head_dim"],
    keys: Float[Tensor, "blocks block_size kv_heads head_dim"],
    values: Float[Tensor, "blocks block_size kv_heads head_dim"],
    query_starts: Int[Tensor, " edges"],
    context_lens: Int[Tensor, " requests"],
    block_table: Int[Tensor, "requests max_blocks"],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Causal attention of each request's new tokens over all its tokens so far.

        cache of a request   [ old old old | new new ]   context_lens = 5
        its rows of query                  [  0   1  ]   row 0 sees 4 tokens, row 1 sees 5

    Request r owns rows [query_starts[r], query_starts[r + 1]) of ``query``; its keys and values, the new ones
    included, lie in the blocks ``block_table[r]``. A row sees itself and the ``window - 1`` tokens before it (all,
    if None). Query head h reads key-value head h // (heads // kv_heads). Softmax in at least float32.
    ``softcap`` c: scores s become c tanh(s / c), as in Gemma 2 (arXiv 2408.00118, section 2).
    """
    out = torch.empty_like(query)
    group = query.shape[1] // keys.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    for request, context in enumerate(context_lens.tolist()):
        rows = slice(int(query_starts[request]), int(query_starts[request + 1]))
        blocks = block_table[request, : -(-context // keys.shape[1])].long()
        k, v = (cache[blocks].flatten(0, 1)[:context].repeat_interleave(group, dim=1) for cache in (keys, values))
        scores = torch.einsum("qhd,chd->hqc", query[rows].to(wide), k.to(wide)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        places = torch.arange(context, device=query.device)
        ages = places[context - scores.shape[1] :, None] - places  # [rows, context]: how far back each key lies
        hidden = (ages < 0) if window is None else (ages < 0) | (ages >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqc,chd->qhd", weights, v.to(wide)).to(query.dtype)
    return out

"""Drawing tokens: greedy choice, filters, and Gumbel-max with noise that depends on (seed, position, token) alone.

The largest of ``score / temperature + Gumbel noise`` is a draw from the softmax (Gumbel 1954; Maddison et al. 2014,
arXiv 1411.0030). The noise comes from a hash, not from a generator with a state, so neither the batch nor the order
of requests changes a draw.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

PREFIX = 1024
"""How many of the best tokens top-p looks at before it sorts them all."""


def greedy(logits: Float[Tensor, "rows vocab"]) -> Int64[Tensor, " rows"]:
    """Return the best token of each row, the lowest id on a tie."""
    return logits.argmax(-1)


def keep_top_k(logits: Float[Tensor, "rows vocab"], top_k: Int64[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
    """Set what is worse than the ``top_k``-th best score of its row to -inf; ties with it stay. 0 keeps all."""
    vocab = logits.shape[1]
    sizes = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    limited = sizes < vocab
    if not limited.any():
        return logits
    best = logits.topk(int(sizes[limited].max()), dim=-1).values
    threshold = best.gather(1, (sizes.clamp(max=best.shape[1]) - 1)[:, None])
    return logits.masked_fill(limited[:, None] & (logits < threshold), -torch.inf)


def keep_top_p(logits: Float[Tensor, "rows vocab"], top_p: Float[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
    """Keep the most likely tokens that together reach probability ``top_p``; the rest becomes -inf.

    The token that crosses the line stays, and so do those that tie with it. 1 keeps all.
    """
    limited = top_p < 1.0
    if not limited.any():
        return logits
    probabilities = logits.softmax(-1)
    for size in (min(PREFIX, logits.shape[1]), logits.shape[1]):  # the few best nearly always suffice
        best = probabilities.topk(size, dim=-1).values
        reached = best.double().cumsum(-1) >= top_p[:, None]
        if bool((reached[:, -1] | ~limited).all()):
            break
    last = torch.where(reached.any(-1), reached.int().argmax(-1), best.shape[1] - 1)
    threshold = best.gather(1, last[:, None])
    return logits.masked_fill(limited[:, None] & (probabilities < threshold), -torch.inf)


def draw(
    logits: Float[Tensor, "rows vocab"], seeds: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"]
) -> Int64[Tensor, " rows"]:
    """Draw a token of each row from the softmax of its logits (already divided by the temperature)."""
    return (logits + gumbel(seeds, positions, logits.shape[1])).argmax(-1)


def gumbel(seeds: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"], vocab: int) -> Float[Tensor, "rows vocab"]:
    """Return standard Gumbel noise, -log(-log(1 - w)) for a uniform w in (0, 1) hashed from (seed, position, token).

    ``1 - w`` keeps full precision where noise is large: the largest of 150,000 is decided by w near 1 / 150,000,
    where float32 still has 24 bits, while a uniform near 1 would have steps of 6e-8.
    """
    first, second = _keys(seeds, positions)
    noise = torch.arange(vocab, dtype=torch.int32, device=seeds.device) * _PHI + first[:, None]
    _mix(noise)
    noise ^= second[:, None]
    _mix(noise)
    # int32 -> (0, 1): the sign bit becomes the upper half
    uniform = noise.float().add_(2.0**31 + 0.5).mul_(2.0**-32).clamp_(2.0**-33, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


_PHI = 0x9E3779B9 - 2**32
"""2^32 over the golden ratio, as int32: neighbouring tokens land far apart."""


def _keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Mix seed and position into two int32 words (the finaliser of SplitMix64, Steele et al. 2014)."""
    mixed = seeds + positions * (0x9E3779B97F4A7C15 - 2**64)
    mixed = (mixed ^ _shift(mixed, 30, 64)) * (0xBF58476D1CE4E5B9 - 2**64)
    mixed = (mixed ^ _shift(mixed, 27, 64)) * (0x94D049BB133111EB - 2**64)
    mixed = mixed ^ _shift(mixed, 31, 64)
    return mixed.to(torch.int32), (mixed >> 32).to(torch.int32)


def _mix(x: Tensor) -> None:
    """Scramble int32 words in place (the 32-bit finaliser that Wellons found by search, "lowbias32")."""
    x ^= _shift(x, 16, 32)
    x *= 0x7FEB352D
    x ^= _shift(x, 15, 32)
    x *= 0x846CA68B - 2**32
    x ^= _shift(x, 16, 32)


def _shift(x: Tensor, places: int, bits: int) -> Tensor:
    """Shift right and fill with zeros, where torch's shift of signed words fills with the sign."""
    return (x >> places) & ((1 << (bits - places)) - 1)

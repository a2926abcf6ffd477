"""Drawing tokens: greedy choice, filters, and Gumbel-max with noise that depends on (seed, position, token) alone.

The largest of ``score / temperature + Gumbel noise`` is a draw from the softmax (Gumbel 1954; Maddison et al. 2014,
arXiv 1411.0030). The noise comes from a hash, not from a generator with a state, so neither the batch nor the order
of requests changes a draw.
"""

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

PREFIX = 1024
"""How many of the best tokens top-p looks at before it sorts them all."""


def greedy(logits: Float[Tensor, "rows vocab"]) -> Int64[Tensor, " rows"]:
    """Return the best token of each row, the lowest id on a tie; -1 for a row that holds NaN."""
    return _best(logits)


def _best(scores: Tensor) -> Tensor:
    best = scores.argmax(-1)  # takes NaN for the largest, so it is enough to look there
    return best.where(scores.gather(-1, best[:, None])[:, 0].isnan().logical_not(), -1)


def choose(
    logits: Float[Tensor, "rows vocab"],
    temperatures: Float32[Tensor, " rows"],
    top_k: Int32[Tensor, " rows"],
    top_p: Float32[Tensor, " rows"],
    min_p: Float32[Tensor, " rows"],
    seeds: Int64[Tensor, " rows"],
    positions: Int64[Tensor, " rows"],
    *,
    filtered: bool,
) -> Int64[Tensor, " rows"]:
    """Choose a token of each row: the best one at temperature 0, else a draw from what the row's filters keep.

    Of a row that holds NaN nothing can be said: -1, and no row notices another's.

    Order, as in vLLM: temperature, min_p, top_k, top_p, draw. ``positions`` counts the tokens before the drawn one.
    Filters that are off: 0, 1 and 0; ``filtered=False`` promises that all of them are, in every row. float32 inside.
    """
    drawing = temperatures > 0
    if bool(drawing.all()):
        return _drawn(logits, temperatures, top_k, top_p, min_p, seeds, positions, filtered=filtered)
    tokens = greedy(logits)
    rows = drawing.nonzero()[:, 0]
    if len(rows):
        parts = (each[rows] for each in (logits, temperatures, top_k, top_p, min_p, seeds, positions))
        tokens[rows] = _drawn(*parts, filtered=filtered)
    return tokens


def _drawn(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, *, filtered: bool,
) -> Tensor:  # fmt: skip
    scaled = logits.float() / temperatures[:, None]
    if filtered:
        limited = ((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1) | (min_p > 0)
        rows = limited.nonzero()[:, 0]  # a filter costs only those who ask for it
        lowest = torch.full_like(temperatures, -torch.inf)
        lowest[rows] = lowest_kept(*(each[rows] for each in (logits, temperatures, top_k, top_p, min_p)))
        scaled.masked_fill_(logits < lowest[:, None], -torch.inf)
    return draw(scaled, seeds, positions)


def lowest_kept(
    logits: Float[Tensor, "rows vocab"],
    temperatures: Float32[Tensor, " rows"],
    top_k: Int32[Tensor, " rows"],
    top_p: Float32[Tensor, " rows"],
    min_p: Float32[Tensor, " rows"],
) -> Float32[Tensor, " rows"]:
    """Return the logit of each row under which its filters keep nothing. Temperatures are positive.

    With the softmax at the row's temperature, a token stays if

        min_p   its probability is at least min_p times the largest one
        top_k   fewer than top_k tokens have a larger logit
        top_p   the tokens with a larger logit have less than top_p of what the other two keep

    so the token that crosses a line stays, and what ties with it too.
    """
    vocab = logits.shape[1]
    lowest = torch.full_like(temperatures, -torch.inf)
    if bool((min_p > 0).any()):
        lowest = logits.amax(-1).float() + temperatures * min_p.log()
    sizes = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()
    limited = sizes < vocab
    if bool(limited.any()):
        best = logits.topk(int(sizes[limited].max()), dim=-1).values
        kth = best.gather(1, sizes.clamp(max=best.shape[1])[:, None] - 1)[:, 0]
        lowest = torch.where(limited, torch.maximum(lowest, kth), lowest)
    limited = top_p < 1
    if not bool(limited.any()):
        return lowest
    scaled = (logits.float() / temperatures[:, None]).masked_fill_(logits < lowest[:, None], -torch.inf)
    probabilities = scaled.softmax(-1)
    most = int(sizes[limited].max())
    for size in (min(PREFIX, most), most):  # the few best nearly always suffice
        best, ids = logits.topk(size, dim=-1)
        reached = probabilities.gather(1, ids).double().cumsum(-1) >= top_p[:, None]
        if bool((reached[:, -1] | ~limited).all()):
            break
    last = torch.where(reached.any(-1), reached.int().argmax(-1), size - 1)
    return torch.where(limited, torch.maximum(lowest, best.gather(1, last[:, None])[:, 0]), lowest)


def processed(
    logits: Float[Tensor, "rows vocab"],
    temperatures: Float32[Tensor, " rows"],
    top_k: Int32[Tensor, " rows"],
    top_p: Float32[Tensor, " rows"],
    min_p: Float32[Tensor, " rows"],
) -> Float32[Tensor, "rows vocab"]:
    """Return the logits that ``choose`` draws from: divided by the temperature, what filters drop at -inf.

    Rows at temperature 0 stay as they are.
    """
    drawing = temperatures > 0
    scaled = logits.float() / temperatures.where(drawing, 1.0)[:, None]
    rows = drawing.nonzero()[:, 0]
    if len(rows):
        lowest = torch.full_like(temperatures, -torch.inf)
        lowest[rows] = lowest_kept(*(each[rows] for each in (logits, temperatures, top_k, top_p, min_p)))
        scaled.masked_fill_(logits < lowest[:, None], -torch.inf)
    return scaled


def log_probs(
    logits: Float[Tensor, "rows vocab"],
    tokens: Int64[Tensor, " rows"],
    number: int,
    given: Int64[Tensor, "rows given"] | None = None,
    *,
    normalized: bool = True,
) -> tuple[
    Float32[Tensor, " rows"], Int64[Tensor, " rows"], Float32[Tensor, "rows best"], Int64[Tensor, "rows best"],
    Float32[Tensor, "rows given"],
]:  # fmt: skip
    """Return of each row its token's log-probability and rank from 1, the ``number`` largest, their ids, and those of
    the ``given`` ids. ``normalized=False``: logits in the place of log-probabilities.

    Ranks count larger logits. Of equal logits among the best, any may come first. float32 inside; fewer than
    ``number`` if the vocabulary is smaller. What stands in the rows of tokens below 0 means nothing.
    """
    own = tokens.clamp(min=0)[:, None]
    scores = logits.float().log_softmax(-1) if normalized else logits.float()
    ids = logits.topk(min(number, logits.shape[1]), dim=-1).indices
    ranks = (logits > logits.gather(1, own)).sum(-1) + 1
    return (
        scores.gather(1, own)[:, 0],
        ranks,
        scores.gather(1, ids),
        ids,
        scores.gather(1, ids[:, :0] if given is None else given),
    )


def draw(
    logits: Float[Tensor, "rows vocab"], seeds: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"]
) -> Int64[Tensor, " rows"]:
    """Draw a token of each row from the softmax of its logits (already divided by the temperature), or -1: NaN."""
    return _best(logits + gumbel(seeds, positions, logits.shape[1]))


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

"""Penalties for what a request holds: counts that the host keeps, and one token that it does not know yet."""

from jaxtyping import Float, Float32, Int64
from torch import Tensor


def penalize(
    logits: Float[Tensor, "rows vocab"],
    rows: Int64[Tensor, " penalized"],
    words: Int64[Tensor, " words"],
    edges: Int64[Tensor, " edges"],
    pending: Int64[Tensor, " penalized"],
    strengths: Float32[Tensor, "3 penalized"],
) -> None:
    """Change in place the logits of ``rows``, each row once, at the tokens that their requests hold.

    A word is ``count << 32 | token``: how often the output holds it, 0 if only the prompt does. Those of the i-th row,
    each token once, are ``words[edges[i] : edges[i + 1]]``; its ``pending`` token was drawn and is not counted, unless
    it is no token of the vocabulary. ``strengths``: repetition, frequency, presence. float32 inside, in the order

        x = x / repetition if x > 0 else x * repetition                 (Keskar et al. 2019, arXiv 1909.05858)
        x = x - frequency * count - presence * (count > 0)              (OpenAI's API reference)
    """
    for place, row in enumerate(rows.tolist()):
        word = words[edges[place] : edges[place + 1]]
        tokens, counts = word & 0xFFFFFFFF, word >> 32
        token = pending[place]
        if bool(token < logits.shape[1]):
            counts = counts + (tokens == token)
            if not bool((tokens == token).any()):
                tokens, counts = _with(tokens, token), _with(counts, token.new_ones(()))
        x = logits[row, tokens].float()
        repetition, frequency, presence = strengths[:, place]
        x = (x / repetition).where(x > 0, x * repetition)
        logits[row, tokens] = (x - frequency * counts - presence * (counts > 0)).to(logits.dtype)


def _with(values: Tensor, value: Tensor) -> Tensor:
    """Return one-dimensional values with one more."""
    longer = values.new_empty(len(values) + 1)
    longer[:-1], longer[-1] = values, value
    return longer

"""Rows of a table."""

from jaxtyping import Float, Int64
from torch import Tensor


def look_up(table: Float[Tensor, "entries ..."], indices: Int64[Tensor, " rows"]) -> Float[Tensor, "rows ..."]:
    """Return ``table[indices]``, all of which are from 0 to the last entry."""
    return table.index_select(0, indices)

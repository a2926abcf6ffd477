"""Which replica a request goes to.

    each replica      queued tokens - AFFINITY * tokens of the prompt's beginning that were sent there before
    the request       goes where it need not wait for a place, and of these where this is least; of equals to the first

So the load is balanced, prompts with the same beginning meet in one prefix cache, and that unbalances the load by no
more than it can save: a replica is never chosen that has more than AFFINITY * (what it knows of the prompt) tokens
queued beyond the one with the fewest. A beginning of one block of 16 tokens moves a request only between replicas that
are as good as equal; a document of 10,000 tokens is worth a wait. Where a replica is too busy another one gets the
prompt, and from then on both know its beginning. Before all of that comes the number of requests: one that has as many
as may run computes no other one yet, however few tokens they are, while another has a place.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

AFFINITY = 4
"""Queued tokens that one known token of a prompt makes up for. More than one, for tokens that are queued may never be
computed (requests end before ``max_tokens``), and a beginning computed twice also fills two caches."""

MOST_BEGINNINGS = 2**16
"""Beginnings that are remembered, those used last; a prompt has one for each of its blocks."""

MOST_BLOCKS = 2**10
"""Blocks of one prompt that are looked at."""


class Balancer:
    """Counts what is queued at each of ``size`` replicas, and remembers which beginnings were sent where.

    ``block_size``: only whole blocks of so many tokens are found again, as in the prefix cache; 0: nothing is.
    ``places``: how many samples may run at once on a replica.
    Time: ``place`` looks at each token of a prompt once.
    """

    def __init__(self, size: int, block_size: int = 0, places: float = math.inf) -> None:
        self.queued = [0] * size
        """Tokens that each replica has still to compute, at most."""
        self.samples = [0] * size
        """Samples that each replica has, running or waiting."""
        self._places = places
        self._block_size = block_size
        self._known: OrderedDict[int, int] = OrderedDict()  # beginning -> replicas that know it, one bit for each

    def place(self, tokens: Sequence[int], salt: str, cost: int, samples: int = 1) -> int:
        """Choose the replica for a prompt, and count its ``cost``: the tokens to compute, prompt and output."""
        beginnings = list(self._beginnings(tokens, salt))
        known = self._known_tokens(beginnings)
        scores = [
            (held + samples > self._places, queued - AFFINITY * found)
            for held, queued, found in zip(self.samples, self.queued, known, strict=True)
        ]
        chosen = scores.index(min(scores))
        for beginning in beginnings:
            self._known[beginning] = self._known.pop(beginning, 0) | 1 << chosen
        while len(self._known) > MOST_BEGINNINGS:
            self._known.popitem(last=False)
        self.queued[chosen] += cost
        self.samples[chosen] += samples
        return chosen

    def take_off(self, replica: int, cost: int, samples: int = 0) -> None:
        """Count tokens that are computed, or that nobody wants any more, and samples that have ended."""
        self.queued[replica] -= cost
        self.samples[replica] -= samples
        assert min(self.queued[replica], self.samples[replica]) >= 0, "more was taken off than was queued"

    def forget(self) -> None:
        """Forget all beginnings: the prefix caches are empty."""
        self._known.clear()

    def _known_tokens(self, beginnings: Sequence[int]) -> list[int]:
        """Return how many tokens of a prompt each replica knows."""
        found = [0] * len(self.queued)
        still = (1 << len(found)) - 1
        for place, beginning in enumerate(beginnings, 1):
            still &= self._known.get(beginning, 0)
            if not still:
                break
            for replica in range(len(found)):
                if still >> replica & 1:
                    found[replica] = place * self._block_size
        return found

    def _beginnings(self, tokens: Sequence[int], salt: str) -> Iterator[int]:
        """Yield a hash for each beginning of whole blocks. Equal ones of different prompts cost time, no more."""
        size, beginning = self._block_size, hash(salt)
        for start in range(0, min(len(tokens) // size, MOST_BLOCKS) * size if size else 0, size or 1):
            beginning = hash((beginning, *tokens[start : start + size]))
            yield beginning

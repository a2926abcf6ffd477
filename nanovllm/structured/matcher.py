"""One request's place in its grammar, and the masks of all requests of a step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.ops.mask import mask_logits
from nanovllm.scheduler import Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Masks:
    """What the matchers of an engine share. llguidance computes masks on threads of its own."""

    executor: Any
    vocab_size: int
    """Tokens of the tokenizer; logits beyond are never allowed."""

    def fill(self, matchers: Sequence[Any], words: Tensor) -> None:
        """Write what each matcher allows: bit t % 32 of word t // 32, int32 [matchers, ceil(vocab_size / 32)]."""
        row_bytes = words.shape[1] * words.element_size()
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(words.data_ptr(), row_bytes)
            return
        places = [(matcher, place) for place, matcher in enumerate(matchers)]
        self.executor.unsafe_compute_mask_ptr(places, words.data_ptr(), row_bytes, len(places))


class GrammarMatcher:
    """Holds one request to its grammar. Its state is a function of the tokens it was given, and of nothing else.

    ``never``: ids that are not allowed even where the text may end.
    """

    def __init__(self, matcher: Any, masks: Masks, never: frozenset[int]) -> None:
        self._matcher = matcher
        self._masks = masks
        self._never = never

    def accept(self, token_id: int) -> str | None:
        """Take a token; return why the request ends with it: ``"stop"``, the text is complete and nothing can follow;
        ``"error"``, the token was not allowed, or the grammar grew past llguidance's limits."""
        if self._matcher.consume_token(token_id) and not self._matcher.is_stopped():
            return None
        if not self._matcher.is_error():
            return "stop"
        logger.warning("a request has left its grammar: %s", self._matcher.get_error().partition("\n")[0])
        return "error"

    def allowed(self) -> np.ndarray:
        """Return the mask of the next token, uint32 [ceil(vocab_size / 32)]."""
        words = torch.empty(1, -(-self._masks.vocab_size // 32), dtype=torch.int32)
        self._masks.fill([self._matcher], words)
        return _without(words.numpy().view(np.uint32)[0], self._never)

    def mask(self, logits: Tensor, spans: Sequence[Span]) -> None:
        """Set to -inf, in place, what may not follow, in the rows whose requests have matchers.

        Ids that are banned before ``min_tokens`` go too, as long as anything else is left: a grammar goes first. On a
        GPU this runs while the device computes the logits; masks and rows are sent in one copy.
        """
        matchers = {
            row: matcher
            for row, span in enumerate(spans)
            if isinstance(matcher := span.request.matcher, GrammarMatcher)
        }
        number, width = len(matchers), -(-self._masks.vocab_size // 32)
        packed = torch.empty(number * (width + 2), dtype=torch.int32, pin_memory=logits.is_cuda)
        packed[: 2 * number].view(torch.int64).copy_(torch.tensor(list(matchers)))
        words = packed[2 * number :].view(number, width)
        self._masks.fill([matcher._matcher for matcher in matchers.values()], words)
        for (row, matcher), line in zip(matchers.items(), words.numpy().view(np.uint32), strict=True):
            _without(line, matcher._never | spans[row].request.banned(spans[row].stop))
        packed = packed.to(logits.device, non_blocking=True)
        mask_logits(logits, packed[: 2 * number].view(torch.int64), packed[2 * number :].view(number, width))


def _without(words: np.ndarray, banned: frozenset[int]) -> np.ndarray:
    """Take ids out of a mask, in place, unless nothing would be left."""
    ids = np.array(sorted(token for token in banned if token < 32 * len(words)), np.int64)
    if len(ids):
        rest = words.copy()
        np.bitwise_and.at(rest, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
        if rest.any():
            words[:] = rest
    return words

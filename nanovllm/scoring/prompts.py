"""Log-probabilities of prompt tokens: the row of each token says what it thinks of the next one.

    prompt        [ p0 p1 p2 p3 | p4 p5 p6 ]      | a cut between two steps
    rows           -> p1 p2 p3 p4 | p5 p6 first token of the output
    entries  None    p1 p2 p3 p4    p5 p6

So the last row of a piece tells of a token that only the next piece computes. Logits are made for some rows at a time
and forgotten at once: those of a prompt of 8,192 tokens would be 2.5 GB with a vocabulary of 150,000.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from nanovllm.batch import send
from nanovllm.ops.sample import log_probs
from nanovllm.request import Sampled
from nanovllm.sampler import StepScores
from nanovllm.scheduler import Span

PIECE_ROWS = 256
"""Rows whose logits exist at a time: as many as the ``max_num_seqs`` for which a step's memory is set aside."""

Deal = Callable[[Sequence[Sampled | None]], list[Sampled | None]]


def score_prompts(model: Any, hidden: Float[Tensor, "tokens width"], spans: Sequence[Span], logprobs_mode: str) -> Deal:
    """Begin to score the prompt tokens that a step's spans tell of; return what adds them to what the spans drew.

    Of the logits as they came: "raw_" ones, as in vLLM, whatever the mode says of drawn tokens. On a GPU the host sends
    one message for each number of best tokens that requests ask for, and waits for nothing here; it has to wait for the
    device before it calls what is returned.
    """
    asked: dict[int, list[tuple[int, range, int]]] = {}
    edge = 0
    for index, span in enumerate(spans):
        if places := span.request.unscored(span.start, span.stop):
            number = span.request.params.prompt_logprobs
            assert number is not None, "nobody asked"
            asked.setdefault(number, []).append((index, places, edge + places.start - span.start))
        edge += span.stop - span.start

    found: list[tuple[list[tuple[int, range, int]], list[int], int, list[Tensor]]] = []
    for number, parts in asked.items():
        rows = np.concatenate([np.arange(first, first + len(places)) for _, places, first in parts])
        tokens: list[int] = []
        for index, places, _ in parts:
            tokens += spans[index].request.prompt_token_ids[places.start + 1 : places.stop + 1]
        sent = [torch.split(part, PIECE_ROWS) for part in send([rows, np.array(tokens, np.int64)], hidden.device)]
        pieces = []
        for row, token in zip(*sent, strict=True):
            logits = model.logits(hidden[row])
            most = logits.shape[1] if number == -1 else number
            pieces.append(log_probs(logits, token, most, normalized=logprobs_mode.endswith("logprobs")))
        arrays = [torch.cat(part).to("cpu", non_blocking=True) for part in zip(*pieces, strict=True)]
        found.append((parts, tokens, most, arrays))

    def deal(drawn: Sequence[Sampled | None]) -> list[Sampled | None]:
        dealt = list(drawn)
        for parts, tokens, number, arrays in found:
            # copies: requests keep them for long, and the memory of a copy from the device is pinned
            copied = (array.numpy(force=True).copy() for array in arrays)
            scores = StepScores(tokens, [number] * len(tokens), 0, [[]] * len(tokens), *copied)
            first = 0
            for index, places, _ in parts:
                told = (places.start + 1, scores, range(first, first + len(places)))
                dealt[index] = (dealt[index] or Sampled(-1))._replace(prompt=told)
                first += len(places)
        return dealt

    return deal

"""Logits to tokens: one draw for each request that reached its end in this step, by that request's own rules."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from nanovllm.ops.sample import draw, greedy, keep_top_k, keep_top_p
from nanovllm.outputs import Logprob
from nanovllm.request import Request, Sampled


def sample(logits: Float[Tensor, "rows vocab"], requests: Sequence[Request]) -> list[Sampled]:
    """Draw the next token of each row; row i belongs to ``requests[i]``. No row changes another.

    Order, as in vLLM: banned ids, temperature, top_k, top_p, draw. Log-probabilities are those of the unchanged
    logits.
    """
    raw = logits
    banned = [sorted(request.banned_token_ids) for request in requests]
    if any(banned):
        logits = logits.clone()
        for row, ids in enumerate(banned):
            logits[row, ids] = -torch.inf
    tokens = greedy(logits)
    drawing = [row for row, request in enumerate(requests) if not request.params.greedy]
    if drawing:
        # rows that draw the same way go together: a filter costs only those who ask for it
        everyone = len(drawing) == len(requests)
        chosen = logits if everyone else logits[drawing]
        drawn = _draw(chosen, [requests[row] for row in drawing])
        tokens = drawn if everyone else tokens.index_copy(0, torch.tensor(drawing, device=tokens.device), drawn)
    ids = tokens.tolist()
    return [
        Sampled(
            token,
            None if request.params.logprobs is None else _logprobs(raw[row], token, request.params.logprobs),
        )
        for row, (token, request) in enumerate(zip(ids, requests, strict=True))
    ]


def _draw(logits: Float[Tensor, "rows vocab"], requests: Sequence[Request]) -> Int64[Tensor, " rows"]:
    device = logits.device
    scaled = logits / torch.tensor([[request.params.temperature] for request in requests], device=device)
    top_k = [max(request.params.top_k, 0) for request in requests]
    top_p = [request.params.top_p for request in requests]
    filtered = [row for row in range(len(requests)) if top_k[row] > 0 or top_p[row] < 1.0]
    if filtered:
        part = keep_top_k(scaled[filtered], torch.tensor([top_k[row] for row in filtered], device=device))
        scaled[filtered] = keep_top_p(part, torch.tensor([top_p[row] for row in filtered], device=device))
    seeds = torch.tensor([request.seed for request in requests], device=device)
    positions = torch.tensor([len(request.token_ids) for request in requests], device=device)
    return draw(scaled, seeds, positions)


def _logprobs(logits: Float[Tensor, " vocab"], token: int, number: int) -> dict[int, Logprob]:
    """Return the drawn token and the ``number`` best, from one log-softmax."""
    logprobs = logits.log_softmax(-1)
    rank = int((logprobs > logprobs[token]).sum()) + 1
    found = {token: Logprob(float(logprobs[token]), rank)}
    best = logprobs.topk(min(number, logprobs.numel()))
    for place, (value, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True), 1):
        found.setdefault(index, Logprob(value, place))
    return found

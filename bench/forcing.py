"""What bench/fp8.py and bench/real_model.py share: an engine's log-probabilities of given tokens (teacher forcing)."""

from collections.abc import Sequence

import clone  # noqa: F401

from nanovllm import LLM, SamplingParams

Scores = list[dict[int, float]]
"""For each place: token -> log-probability, the best first."""


def greedy(tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs, skip_special_tokens=False
    )


def forced(llm: LLM, prompt: Sequence[int], output: Sequence[int], number: int) -> Scores:
    """Return the ``number`` best tokens after the prompt, after the prompt and one token of the output, and so on.

    Each place is a request of its own that draws one token; the prefix cache has what they share.
    """
    tokens = [*prompt, *output]
    prefixes = [tokens[:end] for end in range(len(prompt), len(tokens))]
    made = llm.generate(prefixes, greedy(1, number), use_tqdm=False)
    return [{token: entry.logprob for token, entry in (each.outputs[0].logprobs or [{}])[0].items()} for each in made]


def differences(ours: Scores, theirs: Scores) -> tuple[list[float], int]:
    """Return how far ours are from theirs for each token that theirs name, and how many of these ours do not name."""
    pairs = [
        (mine, token, logprob) for mine, their in zip(ours, theirs, strict=True) for token, logprob in their.items()
    ]
    found = [abs(mine[token] - logprob) for mine, token, logprob in pairs if token in mine]
    return found, len(pairs) - len(found)


def best(scores: Scores) -> list[int]:
    """Return the likeliest token of each place."""
    return [max(place, key=place.__getitem__) for place in scores]

"""What a step costs, learned from the steps there were.

A step's time is taken as a sum: something for the step itself, for each request that decodes, for each token of their
contexts, for prompts being there at all (a GPU then has no graph to replay), for each token of them, for each pair of a
prompt's token and a token that it attends to, and for the launch of prompts. That last one is no part of their own step
where steps overlap, but of the one that runs while the host launches theirs, and is settled so much later.
"""

import math
from dataclasses import dataclass

import numpy as np

from nanovllm.scheduler import Span

NOISE = 0.05
"""How far a measured time lies off the sum, as a part of it."""

FORGET = 0.003
"""Part of what is certain that each step makes uncertain again: the memory is some 300 steps."""

ASTRAY = 0.25
"""An error, as a part of the time, that noise does not explain ..."""

STEPS_ASTRAY = 4
"""... if so many steps one after the other have it: then the machine has changed."""

PRIOR = (0.3, 0.1, 1 / 16_384, 0.3, 1 / 32, 1 / 1_000_000, 0.3)
"""What each term may cost before anything is known, in target times. Large, and tokens before steps: a wrong guess then
is that one more token costs too much, and is found out by smaller steps, not by larger ones."""


@dataclass(frozen=True, slots=True)
class Work:
    """What of a step costs time."""

    decodes: int = 0
    """Requests that compute one token."""
    context: int = 0
    """Tokens that these attend to."""
    prompt: int = 0
    """Tokens of prompts."""
    pairs: float = 0.0
    """Tokens that those attend to, summed over them."""
    launches: bool = False
    """Whether meanwhile a step with prompts was launched."""

    @classmethod
    def of(cls, spans: tuple[Span, ...]) -> "Work":
        """Add up the spans of a decision."""
        decodes = [span.stop for span in spans if span.stop == span.start + 1]
        prompts = [span for span in spans if span.stop > span.start + 1]
        return cls(
            len(decodes),
            sum(decodes),
            sum(span.stop - span.start for span in prompts),
            sum((span.stop - span.start) * (span.start + span.stop) / 2 for span in prompts),
        )

    def terms(self) -> np.ndarray:
        """Return how often each term is in the sum."""
        return np.array([1.0, self.decodes, self.context, self.prompt > 0, self.prompt, self.pairs, self.launches])


class Cost:
    """Recursive least squares on relative errors, no term below zero. ``target`` in seconds sets the scale.

    Relative errors make it hard of hearing for steps that took far too long (a pause, a graph being recorded) and
    quick to forget one that it believed. Certainty decays towards the prior's, not towards none, so that a term that no
    step has for a while keeps its value and is learned anew by the first that has it (Salgado, Goodwin and Middleton
    1988, "Modified least squares algorithm incorporating exponential resetting and forgetting"). Time: 30 us.
    """

    def __init__(self, target: float) -> None:
        self._scale = np.array(PRIOR) * target
        self._costs = np.zeros(len(PRIOR))  # in units of the scale, in which the prior is 0 with variance 1
        self._certainty = np.eye(len(PRIOR))
        self._astray = 0

    def of(self, work: Work) -> float:
        """Seconds that a step is expected to take."""
        return float(self._costs @ (self._scale * work.terms()))

    def learn(self, work: Work, seconds: float) -> None:
        """Take in what a step took."""
        row = self._scale * work.terms() / seconds
        error = 1.0 - float(self._costs @ row)
        sign = int(math.copysign(abs(error) > ASTRAY, error))
        self._astray = self._astray + sign if sign and sign * self._astray >= 0 else sign
        prior = np.eye(len(PRIOR))
        if abs(self._astray) >= STEPS_ASTRAY:
            self._certainty, self._astray = prior, 0
        kept = prior + (1 - FORGET) * (self._certainty - prior)
        self._certainty = kept + np.outer(row, row) / NOISE**2
        self._costs = _solve(self._certainty, kept @ self._costs + row / NOISE**2)

    def most_prompt(self, decoding: Work, start: int, seconds: float) -> float:
        """Tokens of a prompt, of which ``start`` are computed, that fit into a step of ``seconds`` beside decodes.

        Their number p solves room = p * (token + start * pair) + p**2 / 2 * pair.
        """
        mixed, token, pair, launch = (self._costs * self._scale)[3:]
        room = seconds - self.of(decoding) - mixed - launch
        slope = token + start * pair
        if room <= 0:
            return 0.0
        steepness = slope + math.sqrt(slope**2 + 2 * pair * room)
        return float(2 * room / steepness) if steepness else math.inf


def _solve(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Solve for x, with every term left out that would be below zero."""
    free = np.arange(len(vector))
    while True:
        x = np.linalg.solve(matrix[np.ix_(free, free)], vector[free])
        if (x >= 0).all():
            return np.bincount(free, x, len(vector))
        free = free[x >= 0]

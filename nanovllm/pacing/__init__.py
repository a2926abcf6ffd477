"""A batch size that adapts to a target for the time between tokens: ``target_itl_ms``.

The scheduler decides as ever; what changes from step to step are its two limits, how many requests may run and how
many tokens a step may have. They follow from what the steps so far have cost:

    decide      limits <- cost model <- decodes and contexts of the running requests      | Scheduler.schedule()
    settle      cost model, margin <- time since the step before was settled              | Scheduler.update()

A request that runs gains a token in every step, so the time between its tokens is the time of one step. A step of
decodes alone may take three quarters of the target; the rest is for prompts, cut as small as they have to be.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm.pacing.cost import Cost, Work
from nanovllm.request import Request, Sampled
from nanovllm.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)

DECODES = 0.75
"""Part of the target that a step of decodes alone may take when another request is admitted."""

MISSES = 0.02
"""Part of the limited steps that may take longer than the target."""

RATE = 0.03
"""By which part a miss makes the margin larger."""

MOST_MARGIN = 2.0

LEAST = 64
"""A step may always have this part, one in 64, of the tokens that it may have without a target."""

SELDOM = 48
"""Where every step with a prompt is over the target, so many steps of decodes come to lie between two of them: each is
late, and maybe the one before, while it is launched, and 95 of 100 are to hold the target."""

HOPELESS = 32
"""After so many steps in which the target is out of reach a warning says so."""


class Step(NamedTuple):
    """One that is decided and not settled."""

    output: SchedulerOutput
    work: Work
    began: float
    reachable: bool
    """Whether one request alone would be within the target."""
    limited: bool
    """Whether it has prompts, and would have had more of them without a target."""


class PacedScheduler(Scheduler):
    """A scheduler that holds the time between tokens under ``target_itl_ms``, if the machine can.

    Never more than ``max_num_seqs`` and ``max_num_batched_tokens``; never less than one request and a 64th of the
    tokens, so prompts go on whatever the target is. While no request decodes, nobody waits for a token and nothing is
    cut. Where even that many tokens take a step over a target that decodes alone would hold (a GPU has graphs for these
    alone), prompts come less and less often, at last after ``SELDOM`` steps, but with as many tokens as without a
    target: that step is over it anyway, and the others are not. Who runs is not sent back for the sake of the target:
    when steps become slower, fewer are admitted. A target that not even one request alone would hold counts as twice
    what that one takes, and a warning says so.

    The margin is what the model's errors ask for: it grows with each limited step that takes longer than the target,
    and shrinks with the others, so that ``MISSES`` of them do in the long run, whatever the errors are (adaptive
    conformal inference, Gibbs and Candes 2021, arXiv 2106.00170). Limits at most double the largest step that was
    measured. ``clock`` returns seconds. Cost: some 50 us a step, and 0.2 us for each running request.
    """

    def __init__(
        self, *parts: Any, target_itl_ms: float, clock: Callable[[], float] = time.perf_counter, **options: Any
    ) -> None:
        super().__init__(*parts, **options)
        self.target = target_itl_ms / 1e3
        self.cost = Cost(self.target)
        self.margin = 1.0
        self._clock = clock
        self._most_running, self._most_tokens = self.max_running, self.max_num_batched_tokens
        self._least_tokens = max(1, self._most_tokens // LEAST)
        self._seen = Work()  # the largest numbers that were measured
        self._dear = False  # even a few tokens of prompts take a step over the target
        self._distance = 0  # steps without a prompt that shall lie between two with one, while they are so dear
        self._without_prompt = 0  # steps since one had a prompt
        self._under_way: deque[Step] = deque()
        self._settled = 0.0
        self._hopeless = 0

    def schedule(self) -> SchedulerOutput:
        """Decide one step within the limits of now."""
        began = self._clock()
        running = Work(len(self.running), sum(request.num_tokens for request in self.running))
        decodes = [request.num_tokens for request in self.running if request.num_uncomputed_tokens == 1]
        alone = self.cost.of(Work(1, running.context // max(1, running.decodes)))
        aim = self.target / self.margin if alone <= self.target else 2 * alone
        self.max_running = self._running_limit(running, DECODES * aim)
        self._dear = False
        prompt = self._prompt_limit(Work(len(decodes), sum(decodes)), aim) if decodes else self._most_tokens
        self.max_num_batched_tokens = min(self._most_tokens, len(decodes) + prompt)
        output = super().schedule()
        if output.spans:
            work = Work.of(output.spans)
            limited = bool(decodes and work.prompt)
            limited = limited and output.num_tokens == self.max_num_batched_tokens < self._most_tokens
            self._under_way.append(Step(output, work, began, alone <= self.target, limited))
            self._without_prompt = 0 if work.prompt else self._without_prompt + 1
            if work.prompt:
                self._distance = min(2 * self._distance + 1, SELDOM) if self._dear else 0
        return output

    def update(self, output: SchedulerOutput, sampled: Sequence[Sampled | None]) -> list[Request]:
        """Book a computed step, and learn from the time that it took."""
        now = self._clock()
        while self._under_way:  # steps that failed or were taken back are not settled
            step = self._under_way.popleft()
            if step.output is output:
                launches = any(later.work.prompt for later in self._under_way)
                self._learn(
                    step, replace(step.work, launches=launches), max(now - max(step.began, self._settled), 1e-9)
                )
                break
        self._settled = now
        return super().update(output, sampled)

    def _running_limit(self, work: Work, seconds: float) -> int:
        """Return how many requests may run: as many of those that wait as a step of decodes has time for."""
        most = min(self._most_running, max(1, 2 * self._seen.decodes))
        for request in self.waiting[: max(0, most - work.decodes)]:
            grown = Work(work.decodes + 1, work.context + request.num_tokens)
            if self.cost.of(grown) > seconds:
                break
            work = grown
        return max(1, work.decodes)

    def _prompt_limit(self, decodes: Work, seconds: float) -> int:
        """Return how many tokens of prompts a step has time for beside its decodes."""
        prefills = (request for request in self.running if request.num_uncomputed_tokens > 1)
        start = max((request.num_computed_tokens for request in prefills), default=0)
        known = 2 * max(self._seen.prompt, self._least_tokens)
        fits = self.cost.most_prompt(decodes, start, seconds)
        least = replace(decodes, prompt=self._least_tokens, pairs=self._least_tokens * start, launches=True)
        self._dear = fits < self._least_tokens and self.cost.of(decodes) <= self.target < self.cost.of(least)
        if self._dear:
            return int(min(known, self._most_tokens)) if self._without_prompt >= self._distance else 0
        return max(self._least_tokens, int(min(fits, known, self._most_tokens)))

    def _learn(self, step: Step, work: Work, seconds: float) -> None:
        self.cost.learn(work, seconds)
        seen = self._seen
        self._seen = Work(max(seen.decodes, work.decodes), prompt=max(seen.prompt, work.prompt))
        missed = seconds > self.target
        if step.reachable and step.limited and not (missed and work.prompt <= self._least_tokens):
            factor = 1 + RATE if missed else 1 - RATE * MISSES / (1 - MISSES)
            self.margin = min(max(self.margin * factor, 1 / MOST_MARGIN), MOST_MARGIN)
        self._hopeless = 0 if step.reachable else self._hopeless + 1
        if self._hopeless == HOPELESS:
            logger.warning(
                "target_itl_ms=%g cannot be held: one request alone takes more. Steps are held at twice its time; "
                "raise the target, or take a smaller model.", self.target * 1e3,
            )  # fmt: skip

"""A port for whoever watches the engine: metrics, a recording, a live picture. They see everything and change nothing.

            add_request      decide          compute        settle
observer    on_arrival       on_decision    (on_failure)    on_step          on_end, of each request
clock                        began  decided  .. submitted   awaited  computed  settled
"""

from dataclasses import dataclass
from typing import Protocol

from nanovllm.request import Request
from nanovllm.scheduler import SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When the parts of a step began and ended, in seconds of ``time.perf_counter``.

    Where steps overlap, others are decided between ``submitted`` and ``awaited``; from ``awaited`` to ``computed`` the
    host had nothing to do but wait.
    """

    began: float
    decided: float
    submitted: float
    awaited: float
    computed: float
    settled: float


class Observer(Protocol):
    """Watches an engine: one of ``LLMEngine.observers``. It is called on the engine's thread, and holds it up.

    One that raises is dismissed with an error in the log, and the engine goes on.
    """

    def on_arrival(self, request: Request) -> None:
        """See a request that has just been queued; with ``n > 1`` each sample."""

    def on_decision(self, output: SchedulerOutput) -> None:
        """See a step decided; it is neither computed nor known to succeed."""

    def on_step(self, output: SchedulerOutput, times: StepTimes) -> None:
        """See a step settled: what it drew stands in its requests."""

    def on_failure(self, output: SchedulerOutput, error: Exception) -> None:
        """See a step fail: nothing came of it, and its requests end now."""

    def on_end(self, request: Request) -> None:
        """See a request that has ended, for whatever reason, and holds no block any more."""

    def close(self) -> None:
        """The engine is closed: nothing more comes."""

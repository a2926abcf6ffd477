"""What is counted: one table of names, and the four kinds of figures that ``LLM.get_metrics`` returns.

The kinds are vLLM's (``vllm.v1.metrics.reader``). Names that vLLM has too mean what they mean there.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

PREFIX, VLLM_PREFIX = "nanovllm:", "vllm:"


@dataclass(slots=True)
class Metric:
    """One figure. ``labels`` tell those of one name apart."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """Only grows while the engine lives."""

    value: int | float


@dataclass(slots=True)
class Gauge(Metric):
    """What it is now."""

    value: float


@dataclass(slots=True)
class Histogram(Metric):
    """How many observations there were, their sum, and how many were at most each bound ("+Inf": all)."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(slots=True)
class Vector(Metric):
    """Counters in a row. None of ours is one yet; vLLM's scripts name the kind."""

    values: list[int]


class About(NamedTuple):
    """What there is to say of a name."""

    text: str
    kind: type[Metric]
    bounds: str = ""
    """Of a histogram: a name from BOUNDS."""
    vllm: bool = True
    """Whether vLLM has a metric of that name and meaning."""


BOUNDS: dict[str, tuple[float, ...]] = {
    "first token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560
    ),
    "token": (
        0.0005, 0.001, 0.0025, 0.005,  # vLLM begins behind these; a step of a small model takes 0.6 ms
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    ),
    "request": (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
    "step": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "samples": (1, 2, 5, 10, 20),
    "tokens": tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5)),
}  # fmt: skip
"""Upper bounds of buckets: seconds, tokens, or requests. vLLM's, unless a comment says otherwise."""

METRICS = {
    "num_requests_running": About("Requests that hold blocks and are computed", Gauge),
    "num_requests_waiting": About("Requests that wait to be admitted, the preempted ones too", Gauge),
    "kv_cache_usage_perc": About("Part of the cache's blocks that requests or pins read, 0 to 1", Gauge),
    "tokens_per_second": About("Tokens of the last ten seconds, by kind", Gauge, vllm=False),
    "device_memory_bytes": About("Memory of the CUDA device, as PyTorch sees it when asked", Gauge, vllm=False),
    "cache_config_info": About("1; the labels say what the cache is", Gauge),
    "prompt_tokens": About("Prompt tokens of requests that have their first token", Counter),
    "prompt_tokens_cached": About("Those of them that came from the prefix cache", Counter),
    "generation_tokens": About("Tokens drawn", Counter),
    "prefix_cache_queries": About("Prompt tokens that were looked up in the prefix cache", Counter),
    "prefix_cache_hits": About("Prompt tokens that were found there", Counter),
    "num_preemptions": About("How often a running request lost its blocks", Counter),
    "num_evictions": About("How often a cached block was taken for something else", Counter, vllm=False),
    "request_success": About("Requests that have ended, by reason; error and abort too", Counter),
    "num_steps": About("Steps settled", Counter, vllm=False),
    "step_seconds": About("Where the host's time in steps went, by part", Counter, vllm=False),
    "time_to_first_token_seconds": About("From arrival to the first token", Histogram, "first token"),
    "inter_token_latency_seconds": About("Between two tokens of a request", Histogram, "token"),
    "request_time_per_output_token_seconds": About("Mean time between a request's tokens", Histogram, "token"),
    "e2e_request_latency_seconds": About("From arrival to the last token", Histogram, "request"),
    "request_queue_time_seconds": About("From arrival to the first step", Histogram, "request"),
    "request_inference_time_seconds": About("From the first step to the last token", Histogram, "request"),
    "request_prefill_time_seconds": About("From the first step to the first token", Histogram, "request"),
    "request_decode_time_seconds": About("From the first token to the last", Histogram, "request"),
    "request_prompt_tokens": About("Prompt tokens of a request", Histogram, "tokens"),
    "request_generation_tokens": About("Tokens drawn for a request", Histogram, "tokens"),
    "request_params_n": About("n that was asked for", Histogram, "samples"),
    "request_params_max_tokens": About("max_tokens that a request got", Histogram, "tokens"),
    "iteration_tokens_total": About("Tokens computed in a step", Histogram, "step"),
    "step_requests": About("Requests computed in a step", Histogram, "step", vllm=False),
}  # fmt: skip
"""Name without a prefix -> what it is."""


class Buckets:
    """A histogram that is being filled. Cost of an observation: a search among some 20 bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Observe ``value``, ``times`` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def read(self, name: str, labels: dict[str, str]) -> Histogram:
        """Return it as it is now."""
        counts = list(accumulate(self.counts))
        return Histogram(name, labels, counts[-1], self.sum, dict(zip(bound_names(self.bounds), counts, strict=True)))


def bound_names(bounds: Iterable[float]) -> list[str]:
    """Return upper bounds as buckets name them."""
    return [*(str(float(bound)) for bound in bounds), "+Inf"]

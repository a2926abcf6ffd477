"""An observer that counts. What can be read from the engine when somebody asks is not counted at all.

in each step           tokens, requests, time by part; the time between tokens, once for all that go on:
                       requests that drew in this step and in the one before share the time between the two
when a request comes   nothing but its name in a table
when it has its first token, and when it ends: its own times
when somebody asks     queues, blocks, preemptions, evictions, memory
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from nanovllm.build import Plan
from nanovllm.config import EngineConfig
from nanovllm.metrics.advice import Advice
from nanovllm.metrics.exchange import tell
from nanovllm.metrics.figures import BOUNDS, METRICS, PREFIX, Buckets, Counter, Gauge, Histogram, Metric
from nanovllm.observer import StepTimes
from nanovllm.request import Request
from nanovllm.scheduler import Scheduler, SchedulerOutput

REASONS = ("stop", "length", "abort", "error")
"""Why requests end."""

WINDOW_SECONDS = 10
"""Over how long ``tokens_per_second`` looks back."""


class Metrics:
    """Counts what one engine does; ``read`` says it. Implements ``Observer``.

    Belongs to the engine's thread, but ``read`` may be called by any. Cost: some 2 us a step, and where many requests
    run the time to make a list of them.
    """

    def __init__(self, scheduler: Scheduler, config: EngineConfig, facts: Plan, replica: int = 0) -> None:
        self.labels = {"model_name": config.model, "engine": str(replica)}
        self._scheduler = scheduler
        self._device = _one_device(facts.device)
        self._advice = Advice(scheduler, config, facts, options=replica == 0)
        self._cache_info = {
            "block_size": str(facts.block_size),
            "num_gpu_blocks": str(scheduler.blocks.num_blocks),
            "cache_dtype": str(facts.cache_dtype).removeprefix("torch."),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
        }
        self._histograms = {
            name: Buckets(BOUNDS[about.bounds]) for name, about in METRICS.items() if about.kind is Histogram
        }
        self._between = self._histograms["inter_token_latency_seconds"]
        self._step_tokens = self._histograms["iteration_tokens_total"]
        self._step_requests = self._histograms["step_requests"]
        self._ended = dict.fromkeys(REASONS, 0)
        self._num_steps = 0
        self._deciding = self._submitting = self._waiting = self._settling = 0.0  # seconds
        self._prompt_tokens = self._cached_tokens = 0
        self._ended_tokens = self._most_tokens = 0  # drawn by requests that have ended; by all, when last asked
        self._alive: dict[Request, None] = {}
        self._drew: list[Request] = []  # in the step that was settled last
        self._computed = 0.0  # when that step was
        self._some_ended = False  # since then
        self._paused: dict[Request, float] = {}  # preempted: when each drew its last token
        self._began = time.perf_counter()
        self._seconds: deque[list[int]] = deque(maxlen=WINDOW_SECONDS + 1)  # [second, prompt tokens, drawn tokens]

    def on_arrival(self, request: Request) -> None:
        """Remember the request."""
        self._alive[request] = None

    def on_decision(self, output: SchedulerOutput) -> None:
        """Look whether there is something to advise."""
        self._advice.look(output)

    def on_step(self, output: SchedulerOutput, times: StepTimes) -> None:
        """Count a step."""
        spans, computed = output.spans, times.computed
        drew = [span.request for span in spans if span.samples]
        second = int(computed)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        number = num_tokens = len(drew)
        if drew == self._drew and not self._some_ended:
            if drew:
                self._between.add(computed - self._computed, number)
            if len(spans) != number:
                num_tokens = output.num_tokens
        else:
            drew = self._sort(drew, computed)
            number, num_tokens = len(drew), output.num_tokens
        self._seconds[-1][2] += number
        self._drew, self._computed, self._some_ended = drew, computed, False
        self._num_steps += 1
        self._step_tokens.add(num_tokens)
        self._step_requests.add(len(spans))
        self._deciding += times.decided - times.began
        self._submitting += times.submitted - times.decided
        self._waiting += computed - times.awaited
        self._settling += times.settled - computed

    def on_failure(self, output: SchedulerOutput, error: Exception) -> None:
        """Nothing to count: the ends of its requests say it."""

    def on_end(self, request: Request) -> None:
        """Count a request that has ended; its times, if it came to an end of its own with something drawn."""
        del self._alive[request]
        self._paused.pop(request, None)
        self._some_ended = True
        if not self._alive:
            self._drew = []  # an idle engine keeps no requests
        reason = request.finish_reason or "abort"
        self._ended[reason] = self._ended.get(reason, 0) + 1
        number, times = request.num_output_tokens, request.metrics
        self._ended_tokens += number
        if not number or reason not in ("stop", "length"):
            return
        decoding = times.last_token_ts - times.first_token_ts
        if number > 1:
            self._histograms["request_time_per_output_token_seconds"].add(decoding / (number - 1))
        self._histograms["e2e_request_latency_seconds"].add(times.last_token_ts - times.queued_ts)
        self._histograms["request_queue_time_seconds"].add(times.scheduled_ts - times.queued_ts)
        self._histograms["request_inference_time_seconds"].add(times.last_token_ts - times.scheduled_ts)
        self._histograms["request_prefill_time_seconds"].add(times.first_token_ts - times.scheduled_ts)
        self._histograms["request_decode_time_seconds"].add(decoding)
        self._histograms["request_prompt_tokens"].add(len(request.prompt_token_ids))
        self._histograms["request_generation_tokens"].add(number)
        self._histograms["request_params_n"].add(request.params.n)
        self._histograms["request_params_max_tokens"].add(request.max_tokens)

    def close(self) -> None:
        """Let go of all requests; what was counted can still be read."""
        self._alive.clear()
        self._paused.clear()
        self._drew = []

    def tell(self) -> list[Any]:
        """Return what ``read`` does, as JSON can hold it: for another process."""
        return tell(self.read())

    def read(self, *, per_replica: bool = False) -> list[Metric]:
        """Return everything as it is now, in the order of ``figures.METRICS``. This is one engine, however one asks."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        speeds, memory = self._speeds(), _memory_bytes(self._device)
        queries = self._prompt_tokens if blocks.enable_prefix_caching else 0
        parts = {
            "decide": self._deciding, "submit": self._submitting, "wait": self._waiting, "settle": self._settling
        }  # fmt: skip
        values: dict[str, float | list[tuple[dict[str, str], float]]] = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": blocks.num_held / blocks.num_blocks,
            "tokens_per_second": [({"kind": kind}, speed) for kind, speed in speeds.items()],
            "device_memory_bytes": [({"kind": kind}, number) for kind, number in memory.items()],
            "cache_config_info": [(self._cache_info, 1)],
            "prompt_tokens": self._prompt_tokens,
            "prompt_tokens_cached": self._cached_tokens,
            "generation_tokens": self._drawn_tokens(),
            "prefix_cache_queries": queries,
            "prefix_cache_hits": self._cached_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_evictions": blocks.num_evictions,
            "request_success": [({"finished_reason": reason}, number) for reason, number in self._ended.items()],
            "num_steps": self._num_steps,
            "step_seconds": [({"part": part}, seconds) for part, seconds in parts.items()],
        }
        figures: list[Metric] = []
        for name, about in METRICS.items():
            if about.kind is Histogram:
                figures.append(self._histograms[name].read(PREFIX + name, dict(self.labels)))
                continue
            found = values[name]
            make: Any = about.kind
            assert make in (Counter, Gauge)
            for labels, value in found if isinstance(found, list) else [({}, found)]:
                figures.append(make(PREFIX + name, self.labels | labels, value))
        return figures

    def _sort(self, drew: Sequence[Request], computed: float) -> list[Request]:
        """Book who drew where it is not the same requests as in the step before; return those that had not ended."""
        before = dict.fromkeys(self._drew)
        alive = dict.fromkeys(request for request in drew if request in self._alive)  # else it had ended meanwhile
        came = [request for request in alive if request not in before]
        self._between.add(computed - self._computed, len(alive) - len(came))
        for request in came:
            paused = self._paused.pop(request, None)
            if request.metrics.first_token_ts == computed:
                self._book_prompt(request)
            elif paused is not None:
                self._between.add(computed - paused)
        for request in before:
            if request not in alive and request in self._alive:
                self._paused[request] = self._computed
        return list(alive)

    def _book_prompt(self, request: Request) -> None:
        times = request.metrics
        self._histograms["time_to_first_token_seconds"].add(times.first_token_ts - times.queued_ts)
        self._prompt_tokens += len(request.prompt_token_ids)
        self._cached_tokens += request.num_cached_tokens
        self._seconds[-1][1] += len(request.prompt_token_ids)

    def _drawn_tokens(self) -> int:
        """Return the tokens of all requests. A counter must not go back, not even while another one ends."""
        self._most_tokens = max(
            self._most_tokens, self._ended_tokens + sum(request.num_output_tokens for request in list(self._alive))
        )
        return self._most_tokens

    def _speeds(self) -> dict[str, float]:
        """Return tokens a second over the window, or since the engine was built if that is shorter."""
        now = time.perf_counter()
        first = int(now) - WINDOW_SECONDS + 1
        seconds = max(now - max(float(first), self._began), 1e-9)
        recent = [entry for entry in list(self._seconds) if entry[0] >= first]
        return {
            kind: sum(entry[place] for entry in recent) / seconds for place, kind in ((1, "prompt"), (2, "generation"))
        }


def _one_device(device: torch.device) -> torch.device:
    """Return the device that this thread means: which one is the current one is for each thread to say."""
    found = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if found else device


def _memory_bytes(device: torch.device) -> dict[str, int]:
    """Return what PyTorch has given out, what it has taken from the device, and what nobody has; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    free, _ = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device), "free": free
    }  # fmt: skip

"""Warnings with advice: what holds an engine back, with the options that would help and the values they have.

Each kind comes once in a while at most, as a line of logging; nothing else depends on it.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.build import Plan
from nanovllm.config import EngineConfig
from nanovllm.kv_cache import bytes_per_token
from nanovllm.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)

MANY_PREEMPTIONS = 8
"""So many of them are worth a line; one or two are what lets the cache be filled to its end."""

QUEUE_SECONDS = 30.0
"""How long the first in the queue waits before somebody is told why."""

QUIET_SECONDS = 300.0
"""Least time between two lines of one kind; what is slow by its options is said once, when the engine is built."""

FAST_BACKENDS = ("paged", "flash", "flash3")
"""Modules of attention backends that a GPU is not slow with."""


class Advice:
    """Looks at each decision of one engine, and warns. Cost: some 0.3 us while nobody waits too long.

    ``options``: whether to warn of options that are slow, which is for one of several replicas to do.
    """

    def __init__(
        self, scheduler: Scheduler, config: EngineConfig, facts: Plan, *,
        clock: Callable[[], float] = time.perf_counter, options: bool = True,
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._config = config
        self._facts = facts
        self._clock = clock
        self._most_running = scheduler.max_running
        self._preemptions = 0  # as of the last line
        self._look_at_cache = self._look_at_queue = -math.inf  # not before
        for line in slow_paths(config, facts) if options else ():
            logger.warning("%s", line)

    def look(self, output: SchedulerOutput) -> None:
        """See a decision that has just been made."""
        if output.preempted:
            self._preempted()
        waiting = self._scheduler.waiting
        if waiting and not waiting[0].num_preemptions:
            now = self._clock()
            waited = now - waiting[0].metrics.queued_ts
            if waited > QUEUE_SECONDS and now >= self._look_at_queue:
                self._look_at_queue = now + QUIET_SECONDS
                logger.warning(
                    "the first of %d requests in the queue has waited %.0f s: %s",
                    len(waiting), waited, self._bound(output),
                )  # fmt: skip

    def _preempted(self) -> None:
        """Say that the cache is too small. Only a full one makes the scheduler preempt, so its usage says no more."""
        number, now = self._scheduler.num_preemptions, self._clock()
        if number - self._preemptions >= MANY_PREEMPTIONS and now >= self._look_at_cache:
            self._look_at_cache = now + QUIET_SECONDS
            logger.warning(
                "the cache was full %d times%s: requests lost their blocks and are computed again. %s, or lower "
                "max_num_seqs=%d, so that fewer share it.",
                number - self._preemptions, " since the last such line" if self._preemptions else "",
                self._larger_cache(), self._config.max_num_seqs,
            )  # fmt: skip
            self._preemptions = number

    def _bound(self, output: SchedulerOutput) -> str:
        """Say what keeps the queue waiting, and what would change that."""
        scheduler, config, facts = self._scheduler, self._config, self._facts
        running = len(scheduler.running)
        if running >= scheduler.max_running and scheduler.max_running < self._most_running:
            return (
                f"target_itl_ms={config.target_itl_ms} lets {scheduler.max_running} run at once. Raise it, or accept "
                "the wait for the sake of the time between tokens."
            )
        if running >= scheduler.max_running:
            name, value = "max_num_seqs", config.max_num_seqs
            if facts.max_num_batched_tokens < config.max_num_seqs:
                name, value = "max_num_batched_tokens", facts.max_num_batched_tokens
            used = scheduler.blocks.num_held / scheduler.blocks.num_blocks
            return f"{name}={value} is reached, with {used:.0%} of the cache in use. Raise it while blocks are left."
        if output.num_tokens >= scheduler.max_num_batched_tokens:
            return (
                f"each step computes its {scheduler.max_num_batched_tokens} tokens and no more. Raise "
                f"max_num_batched_tokens={facts.max_num_batched_tokens}, or send less than the device can compute."
            )
        return f"no blocks are left for it, with {running} requests running. {self._larger_cache()}."

    def _larger_cache(self) -> str:
        """Say how large the cache is, and which options make more fit."""
        config, facts, blocks = self._config, self._facts, self._scheduler.blocks
        each = bytes_per_token(facts.model, facts.cache_dtype) * facts.block_size
        levers = []
        if config.num_gpu_blocks_override is not None:
            levers.append(f"raise num_gpu_blocks_override={config.num_gpu_blocks_override}")
        elif config.kv_cache_memory_bytes is not None:
            levers.append(f"raise kv_cache_memory_bytes={config.kv_cache_memory_bytes}")
        elif facts.device.type != "cuda":
            levers.append("give more with kv_cache_memory_bytes")
        else:
            levers.append(f"raise gpu_memory_utilization={config.gpu_memory_utilization}")
        levers.append(f"lower max_model_len={facts.max_model_len}")
        if facts.device.type == "cuda" and facts.cache_dtype.itemsize > 1:
            levers.append("take kv_cache_dtype='fp8', with which twice as many tokens fit")
        return (
            f"It has {blocks.num_blocks} blocks of {facts.block_size} tokens ({blocks.num_blocks * each / 2**30:.2f} "
            f"GiB): {', '.join(levers)}"
        )


def slow_paths(config: EngineConfig, facts: Plan) -> list[str]:
    """Return what the options or the machine make slow on a GPU, each with the fast way."""
    if facts.device.type != "cuda":
        return []
    backend: Any = facts.backend.__name__.rpartition(".")[2]
    lines = []
    if config.enforce_eager:
        lines.append(
            "enforce_eager=True: each step launches its kernels one by one. Leave it out, and steps of decodes are "
            "replayed as CUDA graphs, several times as fast where few requests run."
        )
    if backend not in FAST_BACKENDS:
        lines.append(
            f"attention by {backend}, which gathers the cache in each step. The Triton backend reads it in place: it "
            "needs compute capability 8.0, the package triton, and attention_backend='auto' or 'triton'."
        )
    if facts.dtype in (torch.float32, torch.float64):
        lines.append(
            f"dtype {str(facts.dtype).removeprefix('torch.')} reads and multiplies twice the bytes that "
            "dtype='bfloat16' would, without most of the device's arithmetic; take that unless you need the digits."
        )
    return lines

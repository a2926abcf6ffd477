"""The least time that work can take on this machine: what it must read against how fast a copy goes, what it must
multiply against how fast a large product goes. Both are measured here, on the machine itself.

    decode    every step reads the weights once, and the keys and values of every running request once
    prefill   every prompt token goes through every matrix once, and attends to what stands before it
"""

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanovllm.cli.rows import Load
from nanovllm.config import ModelConfig

COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
"""Size of the buffer that is copied: well above any cache."""
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices that are multiplied."""
ROUNDS, CALLS = 5, 4


@dataclass(frozen=True, slots=True)
class Roof:
    """What a machine can do at best, as measured."""

    bytes_per_second: float
    """Read and written, by a copy."""
    flops_per_second: float
    """By a product of two square matrices in the type that is computed in."""


@dataclass(frozen=True, slots=True)
class Work:
    """What something must move and multiply at the least."""

    num_bytes: float
    num_flops: float

    def seconds(self, roof: Roof) -> float:
        """Return the least time it takes: one of the two is the limit, the other goes on beside it."""
        return max(self.num_bytes / roof.bytes_per_second, self.num_flops / roof.flops_per_second)


def measure_roof(device: torch.device, dtype: torch.dtype) -> Roof:
    """Time a copy, and a product of matrices of ``dtype``."""
    roof = Roof(copy_bandwidth(device), product_rate(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return roof


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes a second, read and written. Takes twice the buffer, or half of what is free on a small GPU."""
    size = COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations a second: two for each of width ** 3 pairs of numbers."""
    width = PRODUCT_SIZE.get(device.type, PRODUCT_SIZE["cpu"])
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2 * width**3 / median_seconds(lambda: left @ right, device)


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes, the device's part included: the median of some rounds, after one to warm up."""
    took = []
    for _ in range(ROUNDS + 1):
        _wait(device)
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        _wait(device)
        took.append((time.perf_counter() - started) / CALLS)
    return statistics.median(took[1:])


def device_name(device: torch.device) -> str:
    """Return what the device is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What one model costs, step by step."""

    config: ModelConfig
    num_parameters: int
    """All numbers of the model; a tied head counts once."""
    weight_itemsize: int
    cache_itemsize: int
    max_num_seqs: int

    def decode(self, load: Load, first: int = 1) -> Work:
        """Add up the steps in which requests go from ``first`` output tokens to all of them.

        The step that follows output token k reads the keys and values of prompt + k tokens; what all prompts
        share is read once for all.
        """
        gained = [length - first for length in load.lengths]
        steps = max(*gained, -(-sum(gained) // self.max_num_seqs)) if gained else 0
        read = attended = 0
        for window, layers in Counter(self.config.windows).items():
            spans = [
                _triangle(len(prompt) + length - 1, window) - _triangle(len(prompt) + first - 1, window)
                for prompt, length in zip(load.prompts, load.lengths, strict=True)
            ]
            seen = load.shared if window is None else min(load.shared, window)
            attended += layers * sum(spans)
            read += layers * (sum(spans) - seen * (sum(gained) - steps))
        token_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * self.cache_itemsize
        return Work(
            num_bytes=steps * self._read_parameters * self.weight_itemsize + read * token_bytes,
            num_flops=2 * sum(gained) * self._read_parameters + self._attention_flops(attended),
        )

    def prefill(self, load: Load) -> Work:
        """Add up what all prompts need until their first token; what they share is computed once."""
        tokens = sum(len(prompt) - load.shared for prompt in load.prompts) + load.shared
        attended = 0
        for window, layers in Counter(self.config.windows).items():
            start = _triangle(load.shared, window)
            attended += layers * (start + sum(_triangle(len(prompt), window) - start for prompt in load.prompts))
        head = self.config.vocab_size * self.config.hidden_size
        return Work(
            num_bytes=self._read_parameters * self.weight_itemsize,
            num_flops=2 * tokens * (self._read_parameters - head)
            + 2 * len(load.prompts) * head
            + self._attention_flops(attended),
        )

    def steps(self, steps: Sequence[Sequence[tuple[int, int, bool]]], shared: int = 0) -> tuple[Work, Work]:
        """Add up steps given as spans (start, stop, whether a token is drawn): (products of matrices, attention).

        The first ``shared`` tokens of all requests are the same, and read once a step.
        """
        spans = [span for step in steps for span in step]
        tokens, drawn = sum(stop - start for start, stop, _ in spans), sum(samples for *_, samples in spans)
        head = self.config.vocab_size * self.config.hidden_size
        products = Work(
            num_bytes=len(steps) * self._read_parameters * self.weight_itemsize,
            num_flops=2 * tokens * (self._read_parameters - head) + 2 * drawn * head,
        )
        read = attended = 0
        for window, layers in Counter(self.config.windows).items():
            attended += layers * sum(_triangle(stop, window) - _triangle(start, window) for start, stop, _ in spans)
            for step in steps:  # a span of several tokens reads what the first of them sees, and what follows
                read += layers * sum(min(stop, (window or stop) + stop - start - 1) for start, stop, _ in step)
                sharing = sum(start >= shared for start, *_ in step)
                read -= layers * min(shared, window or shared) * max(0, sharing - 1)
        token_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * self.cache_itemsize
        return products, Work(num_bytes=read * token_bytes, num_flops=self._attention_flops(attended))

    @property
    def _read_parameters(self) -> int:
        """What a step reads: all but a table of embeddings that is not the head too."""
        table = self.config.vocab_size * self.config.hidden_size
        return self.num_parameters - (0 if self.config.tie_word_embeddings else table)

    def _attention_flops(self, pairs: int) -> int:
        """Two products, each of two operations for every channel."""
        return 4 * self.config.num_heads * self.config.head_dim * pairs


def _triangle(length: int, window: int | None) -> int:
    """Return 1 + 2 + ... + length, where no term is above ``window``."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""The metrics of ``data_parallel_size``: each replica counts for itself, and is asked when somebody asks.

replica                  the user's process
Metrics.read -> tell --> hear -> figures of each, told apart by the label ``engine``
                            `--> total: as if one engine had counted
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.metrics.counting import Metrics
from nanovllm.metrics.exchange import hear
from nanovllm.metrics.figures import METRICS, PREFIX, Counter, Gauge, Histogram, Metric

ALL = "all"
"""The label ``engine`` of what replicas have counted together."""

USAGE, INFO, BLOCKS = "kv_cache_usage_perc", "cache_config_info", "num_gpu_blocks"


class Together:
    """Asks the replicas of one engine. ``ask`` returns what each tells, and raises EngineError if one is lost."""

    def __init__(self, ask: Callable[[], list[Any]]) -> None:
        self._ask = ask

    def read(self, *, per_replica: bool = False) -> list[Metric]:
        """Return everything as it is now, of all replicas together, or of each; see ``LLM.get_metrics``."""
        replicas = [hear(told) for told in self._ask()]
        return in_order(chain(*replicas)) if per_replica else total(replicas)


def attach(engine: Any, config: EngineConfig, facts: Any, replica: int = 0) -> Metrics | Together:
    """Return what counts what an engine does, or asks those that count."""
    if config.data_parallel_size > 1:
        return Together(engine.told)
    metrics = Metrics(engine.scheduler, config, facts, replica)
    engine.observers.append(metrics)
    return metrics


def in_order(figures: Iterable[Metric]) -> list[Metric]:
    """Return all figures of one name after those of another, as ``METRICS`` has them."""
    places = {PREFIX + name: place for place, name in enumerate(METRICS)}
    return sorted(figures, key=lambda figure: places[figure.name])


def total(replicas: Sequence[Sequence[Metric]]) -> list[Metric]:
    """Add up what each of several replicas has counted.

    Counters, gauges and buckets are sums. The usage of the cache is the sum of the blocks in use over that of all
    blocks, and what is said of the cache says that sum.
    """
    sizes = [_num_blocks(figures) for figures in replicas]
    found: dict[tuple[Any, ...], Metric] = {}
    for figures, size in zip(replicas, sizes, strict=True):
        for figure in figures:
            name, labels = figure.name.removeprefix(PREFIX), figure.labels | {"engine": ALL}
            if name == INFO:
                labels[BLOCKS] = str(sum(sizes))
            part = replace(figure, labels=labels)
            if name == USAGE:
                assert isinstance(part, Gauge)
                part.value = round(part.value * size)  # blocks in use, exactly
            key = (name, *sorted(labels.items()))
            if key not in found:
                found[key] = part
            elif name != INFO:
                found[key] = _sum(found[key], part)
    for figure in found.values():
        if figure.name == PREFIX + USAGE and isinstance(figure, Gauge):
            figure.value /= sum(sizes)
    return in_order(found.values())


def _num_blocks(figures: Iterable[Metric]) -> int:
    return sum(int(figure.labels[BLOCKS]) for figure in figures if figure.name == PREFIX + INFO)


def _sum(one: Metric, other: Metric) -> Metric:
    if isinstance(one, Histogram):
        assert isinstance(other, Histogram)
        buckets = {bound: number + other.buckets[bound] for bound, number in one.buckets.items()}
        return replace(one, count=one.count + other.count, sum=one.sum + other.sum, buckets=buckets)
    assert isinstance(one, (Counter, Gauge)) and isinstance(other, (Counter, Gauge))
    return replace(one, value=one.value + other.value)

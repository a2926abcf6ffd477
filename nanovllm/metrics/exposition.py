"""Prometheus text, through ``prometheus-client``: a collector over what ``get_metrics`` returns.

The package is imported when text is asked for; nothing is registered with its global registry.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

from nanovllm.errors import ConfigError
from nanovllm.metrics.figures import METRICS, PREFIX, VLLM_PREFIX, Counter, Gauge, Histogram, Metric


class Source(Protocol):
    """Something that counts: an ``LLM`` or an ``AsyncLLM``."""

    def get_metrics(self, *, per_replica: bool = False) -> Sequence[Metric]:
        """Return everything as it is now, the figures of one name one after the other."""


def exposition(llm: Source, *, vllm_names: bool = False) -> str:
    """Return the metrics in Prometheus's text format, ready to be served at ``/metrics``.

    ``vllm_names``: those that vLLM has too are called ``vllm:...``, so that dashboards made for it work; the others
    keep their names. With ``data_parallel_size`` each replica has its series, by the label ``engine``, and there is
    none of their sum: whoever adds up series would count everything twice. Raises ConfigError if the engine keeps no
    metrics, or prometheus-client is not installed.
    """
    client = prometheus_client()
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(Collector(llm, vllm_names=vllm_names))
    text: str = client.generate_latest(registry).decode()
    return text


class Collector:
    """For a registry of one's own: ``registry.register(Collector(llm))``. Reads the engine at each scrape."""

    def __init__(self, llm: Source, *, vllm_names: bool = False) -> None:
        self._llm = llm
        self._vllm_names = vllm_names
        self._core = prometheus_client().core

    def describe(self) -> list[Any]:
        """Say nothing before the first scrape: an engine may be closed by then."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield one family for each name."""
        for name, figures in groupby(self._llm.get_metrics(per_replica=True), key=lambda figure: figure.name):
            yield self._family(name.removeprefix(PREFIX), list(figures))

    def _family(self, name: str, figures: Sequence[Metric]) -> Any:
        about = METRICS[name]
        prefix = VLLM_PREFIX if self._vllm_names and about.vllm else PREFIX
        kinds = {
            Counter: self._core.CounterMetricFamily,
            Gauge: self._core.GaugeMetricFamily,
            Histogram: self._core.HistogramMetricFamily,
        }
        family = kinds[about.kind](prefix + name, about.text + ".", labels=list(figures[0].labels))
        for figure in figures:
            labels = list(figure.labels.values())
            if isinstance(figure, Histogram):
                family.add_metric(labels, buckets=list(figure.buckets.items()), sum_value=figure.sum)
            else:
                assert isinstance(figure, (Counter, Gauge))
                family.add_metric(labels, figure.value)
        return family


def prometheus_client() -> Any:
    """Import the package, or say how to install it."""
    try:
        import prometheus_client as client
        import prometheus_client.core
    except ImportError as missing:
        raise ConfigError(
            f"Prometheus text needs the package prometheus-client ({missing}). Install it: "
            "pip install 'nanovllm[metrics]'; get_metrics() needs nothing."
        ) from missing
    return client

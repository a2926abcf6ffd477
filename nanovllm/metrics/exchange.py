"""Figures on their way from one process to another, as JSON can hold them."""

from collections.abc import Iterable
from typing import Any

from nanovllm.errors import EngineError
from nanovllm.metrics.figures import BOUNDS, METRICS, PREFIX, Counter, Gauge, Histogram, Metric, bound_names


def tell(figures: Iterable[Metric]) -> list[Any]:
    """Return figures as JSON can hold them: name, labels, value; of a histogram its sum and its buckets."""
    told = []
    for figure in figures:
        value: Any
        if isinstance(figure, Histogram):
            value = [figure.sum, *figure.buckets.values()]
        else:
            assert isinstance(figure, (Counter, Gauge))
            value = figure.value
        told.append([figure.name.removeprefix(PREFIX), figure.labels, value])
    return told


def hear(told: Any) -> list[Metric]:
    """Read what ``tell`` returned. Raises EngineError for what it would not have."""
    try:
        return [_figure(*row) for row in told]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"a replica's metrics cannot be read ({type(error).__name__}: {error}); it does not run the same code, or "
            "memory is damaged."
        ) from error


def _figure(name: str, labels: dict[str, str], value: Any) -> Metric:
    about = METRICS[name]
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise TypeError(f"{name} has the labels {labels}")
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, (int, float)) and number >= 0 for number in numbers):
        raise ValueError(f"{name} is {value}")
    if about.kind is not Histogram:
        make: Any = about.kind
        figure: Metric = make(PREFIX + name, labels, *numbers)
        return figure
    seconds, *counts = value
    if counts != sorted(counts):
        raise ValueError(f"{name} has the buckets {counts}")
    buckets = dict(zip(bound_names(BOUNDS[about.bounds]), counts, strict=True))
    return Histogram(PREFIX + name, labels, counts[-1], seconds, buckets)

"""What an engine does, in figures: ``LLM.get_metrics``, Prometheus text, and warnings with advice.

docs/metrics.md lists the names.
"""

from nanovllm.metrics.counting import Metrics
from nanovllm.metrics.exposition import Collector, exposition
from nanovllm.metrics.figures import Counter, Gauge, Histogram, Metric, Vector
from nanovllm.metrics.replicas import Together, attach

__all__ = [
    "Collector", "Counter", "Gauge", "Histogram", "Metric", "Metrics", "Together", "Vector", "attach", "exposition"
]  # fmt: skip

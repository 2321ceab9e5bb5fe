"""For type checkers: see `quire.entrypoints.vllm_names`."""

from quire.entrypoints.as_vllm import Counter, Gauge, Metric, Vector
from quire.metrics.histogram import Histogram

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]

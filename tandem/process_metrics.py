"""Prometheus metrics common to every process of a cluster."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem import __version__


class _Process(Collector):
    def __init__(self, num_restarts: int) -> None:
        self._num_restarts = num_restarts

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("tandem_build", "The version that runs.", value={"version": __version__})
        yield CounterMetricFamily(
            "tandem_process_restarts", "Times that this process was started again.", value=self._num_restarts
        )


def process_registry(num_restarts: int) -> CollectorRegistry:
    """Create a registry with the process's version, restarts, CPU time, memory and open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Process(num_restarts))
    return registry

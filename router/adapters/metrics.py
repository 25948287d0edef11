"""Metrics of adapters, listed in docs/metrics.md."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.router.adapters.names import AdapterNames
from tandem.router.workers.worker import Worker


def adapter_metrics(names: AdapterNames, workers: Iterable[Worker]) -> Iterator[Metric]:
    """Yields metrics of loaded adapters only, so that they do not grow with loads and unloads."""
    loaded = names.loaded()
    yield GaugeMetricFamily("tandem_adapters_loaded", "Adapters that requests can name.", len(loaded))
    places = GaugeMetricFamily(
        "tandem_adapter_workers", "Workers that have the adapter, by place.", labels=("adapter", "place")
    )
    ended = CounterMetricFamily(
        "tandem_adapter_requests", "Ended requests of the adapter.", labels=("adapter", "outcome")
    )
    every = list(workers)
    for entry in loaded:
        assert entry.adapter is not None
        content_hash = entry.adapter.content_hash
        places.add_metric((entry.name, "device"), sum(content_hash in worker.adapters.on_device for worker in every))
        places.add_metric((entry.name, "host"), sum(content_hash in worker.adapters.in_host for worker in every))
    for (name, outcome), count in sorted(names.num_ended.items()):
        ended.add_metric((name, outcome), count)
    yield places
    yield ended

"""Prometheus metrics of a page store, listed in docs/metrics.md."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.pagestore.messages import TIER_NAMES
from tandem.pagestore.server.disk.disk_stats import DiskStats
from tandem.pagestore.server.stats import StoreStats
from tandem.process_metrics import process_registry


class StoreCollector(Collector):
    """Converts the store's latest statistics to metrics, on any thread."""

    def __init__(
        self, store_id: str, stats: Callable[[], StoreStats | None], disk: Callable[[], DiskStats | None]
    ) -> None:
        """
        Args:
            stats: returns None before the first session.
            disk: returns None then, and without a disk.
        """
        self._store_id = store_id
        self._stats = stats
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        if (stats := self._stats()) is None:
            return
        counts = stats.counts
        slots = {
            "free": stats.num_free,
            "writing": stats.num_writing,
            "reading": stats.num_reading,
            "ready": stats.num_ready,
        }
        yield self._by(GaugeMetricFamily, "slots", "Slots of the page store by state.", "state", slots)
        yield self._gauge("pinned_slots", "Ready slots that workers or the disk copy from.", stats.num_pinned)
        yield self._gauge("sessions", "Workers with an open session.", stats.num_sessions)
        yield self._gauge("waiting_finds", "Requests of workers whose pages are being read.", stats.num_waiting)
        yield self._gauge(
            "disk_queue_pages",
            "Pages to be written to disk, or being written.",
            stats.num_queued + stats.num_written_behind,
        )
        answers = {
            "granted": counts.pages_granted,
            "present": counts.pages_present,
            "refused": counts.pages_refused,
        }
        yield self._by(CounterMetricFamily, "offered_pages", "Pages that workers offered.", "answer", answers)
        yield self._counter("written_pages", "Pages that workers wrote.", counts.pages_written)
        hits = {name: counts.hits.get(tier, 0) for tier, name in enumerate(TIER_NAMES)}
        yield self._by(CounterMetricFamily, "hit_pages", "Sought pages that were found.", "tier", hits)
        yield self._counter("missed_pages", "Sought pages that were not found.", counts.keys_missed)
        yield self._counter("evicted_pages", "Pages evicted from memory.", stats.num_evictions)
        yield self._counter("failed_reads", "Reads from disk and peers that failed.", counts.failed_reads)
        yield self._counter("failed_writes", "Writes to disk that failed.", stats.failed_writes)
        yield self._counter("purges", "Purges of all pages.", counts.purges)
        if (disk := self._disk()) is not None:
            yield from self._of_disk(disk)

    def _of_disk(self, disk: DiskStats) -> Iterator[Metric]:
        yield self._gauge("disk_up", "0 after a failure has turned the disk off.", not disk.is_off)
        yield self._gauge("disk_pages", "Pages on disk.", disk.num_pages)
        yield self._gauge("disk_bytes", "Size of the files on disk.", disk.num_bytes)
        pages = {"read": disk.num_read, "written": disk.num_written, "failed": disk.num_failed}
        yield self._by(CounterMetricFamily, "disk_moved_pages", "Pages read from and written to disk.", "how", pages)
        seconds = {"read": disk.read_s, "written": disk.write_s}
        yield self._by(CounterMetricFamily, "disk_seconds", "Time of all threads in reads and writes.", "how", seconds)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tandem_store_{name}", text, labels=("store",))
        family.add_metric((self._store_id,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tandem_store_{name}", text, labels=("store",))
        family.add_metric((self._store_id,), value)
        return family

    def _by(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(f"tandem_store_{name}", text, labels=("store", label))
        for value, number in values.items():
            family.add_metric((self._store_id, value), number)
        return family


def store_registry(
    store_id: str, stats: Callable[[], StoreStats | None], disk: Callable[[], DiskStats | None], num_restarts: int
) -> CollectorRegistry:
    registry = process_registry(num_restarts)
    registry.register(StoreCollector(store_id, stats, disk))
    return registry

"""What the router counts. Every duration is a phase of tandem.lifecycle.

It has a registry and histograms of its own: a gap is observed for every token, and a library's histogram, made to be
used from many threads, would cost as much as passing the token on.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.worker_registry import WorkerRegistry
from tandem.lifecycle import PHASES, PhaseTiming

# They suit a local CPU model and a fast GPU: from a tenth of a millisecond to minutes, in steps of 2 to 2.5.
_STEPS = (1e-4, 2.5e-4, 5e-4)
SECONDS_BUCKETS = tuple(round(step * 10**power, 7) for power in range(7) for step in _STEPS if step * 10**power <= 500)


class SecondsHistogram:
    """Counts of durations; belongs to one thread."""

    def __init__(self, buckets: Sequence[float] = SECONDS_BUCKETS) -> None:
        """Args: buckets: their upper bounds in seconds, rising."""
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [*map(str, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class RouterMetrics(Collector):
    """Filled by the router on its loop, read there too: a scrape is one more request to that loop."""

    def __init__(
        self,
        registry: WorkerRegistry,
        num_requests: Callable[[], int],
        num_queued: Callable[[], int],
        num_waiting: Callable[[], int],
        not_ready_reason: Callable[[], str],
    ) -> None:
        """
        Args:
            registry: the workers.
            num_requests, num_queued, num_waiting: requests in hand; those of them that wait for their first token; and
                for a worker.
            not_ready_reason: why no request would be served now, or "".
        """
        self._registry = registry
        self._num_requests = num_requests
        self._num_queued = num_queued
        self._num_waiting = num_waiting
        self._not_ready_reason = not_ready_reason
        self._outcomes: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._num_unknown_fields = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_cached_tokens = 0
        self._phases: defaultdict[str, SecondsHistogram] = defaultdict(SecondsHistogram)
        self.itl = SecondsHistogram()
        self.worker_wait = SecondsHistogram()
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._prometheus = CollectorRegistry()
        self._prometheus.register(self)

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Of what a part of the router holds. Args: value: asked at each scrape."""
        self._gauges.append((name, text, value))

    def request_refused(self, outcome: str) -> None:
        """A request was turned away before anything was done for it."""
        self._outcomes[outcome] += 1

    def unknown_fields(self, num_fields: int) -> None:
        """A body had so many fields that nobody here knows."""
        self._num_unknown_fields += num_fields

    def request_ended(
        self,
        outcome: str,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        timings: Iterable[PhaseTiming],
    ) -> None:
        self._outcomes[outcome] += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += num_cached_tokens
        self._num_generated_tokens += num_output_tokens
        for timing in timings:
            # Clocks of processes may differ by a little: what seems to have ended before it began took no time.
            self._phases[timing.name].observe(max(0.0, timing.duration_ms / 1e3))

    def attempt_restarted(self, kind: str) -> None:
        """A request begins another attempt: why the one before ended."""
        self._restarts[kind] += 1

    def fault(self, kind: str) -> None:
        self._faults[kind] += 1

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._prometheus)

    def collect(self) -> Iterable[Metric]:
        yield _counter("tandem_requests", "Requests by how they ended", ("outcome",), self._outcomes)
        yield CounterMetricFamily(
            "tandem_unknown_fields",
            "Fields of requests over HTTP that were taken and are not known",
            value=self._num_unknown_fields,
        )
        yield CounterMetricFamily(
            "tandem_prompt_tokens", "Prompt tokens of the requests that ended", value=self._num_prompt_tokens
        )
        yield CounterMetricFamily(
            "tandem_cached_prompt_tokens",
            "Prompt tokens of those requests that prefill did not compute, as told to the clients",
            value=self._num_cached_tokens,
        )
        yield CounterMetricFamily(
            "tandem_generated_tokens", "Output tokens passed on to clients", value=self._num_generated_tokens
        )
        yield _counter("tandem_restarts", "Attempts after a request's first, by why", ("kind",), self._restarts)
        yield _counter("tandem_faults", "Workers that the router lost, by how", ("kind",), self._faults)
        phases = HistogramMetricFamily("tandem_phase_seconds", "Phases of a request's life", labels=("phase",))
        for spec in PHASES:
            if spec.name not in ("ttft", "e2e") and spec.name in self._phases:
                self._phases[spec.name].add_to(phases, (spec.name,))
        yield phases
        for name, text in (("ttft", "Time to first token"), ("e2e", "Time from a request's arrival to its end")):
            yield _histogram(f"tandem_{name}_seconds", text, self._phases[name])
        yield _histogram("tandem_itl_seconds", "Gaps between tokens", self.itl)
        yield _histogram(
            "tandem_worker_wait_seconds",
            "Times for which requests waited for a worker, of those that had to",
            self.worker_wait,
        )
        yield GaugeMetricFamily("tandem_requests_in_hand", "Requests being served", value=self._num_requests())
        yield GaugeMetricFamily(
            "tandem_requests_queued", "Those of them that wait for their first token", value=self._num_queued()
        )
        yield GaugeMetricFamily(
            "tandem_requests_waiting", "Requests in hand that no worker takes now", value=self._num_waiting()
        )
        roles = Counter(worker.role for worker in self._registry)
        workers = GaugeMetricFamily("tandem_workers", "Connected workers", labels=("role",))
        for role in ("prefill", "decode", "both"):
            workers.add_metric((role,), roles[role])
        yield workers
        for name, text, value in self._gauges:
            yield GaugeMetricFamily(name, text, value=value())
        yield GaugeMetricFamily("tandem_ready", "1 if a request would be served", value=not self._not_ready_reason())


def _counter(name: str, text: str, labels: Sequence[str], values: Counter[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label, value in sorted(values.items()):
        family.add_metric((label,), value)
    return family


def _histogram(name: str, text: str, histogram: SecondsHistogram) -> Metric:
    family = HistogramMetricFamily(name, text)
    histogram.add_to(family, ())
    return family

"""The router's metrics. Every duration is a phase of tandem.lifecycle.

Each label value exists from the start, at 0: Prometheus sees no growth in a series that begins at 1.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.config import ROLES
from tandem.lifecycle import ASSIGNED, FIRST_TOKEN, PHASES, TOTALS
from tandem.messages import MOVE_REFUSALS, NO_HITS, CachedPrefixes
from tandem.prefix import IDENTITY_BYTES
from tandem.process_metrics import process_registry
from tandem.router.observe.histograms import (
    E2E_SECONDS,
    ITL_SECONDS,
    PHASE_SECONDS,
    RATIOS,
    TOKENS,
    TTFT_SECONDS,
    HistogramFamily,
)
from tandem.router.observe.request_spans import DROP_REASONS
from tandem.router.policies.base import AttemptFailure
from tandem.router.policies.cost_model import REASONS
from tandem.router.requests.clock_offsets import ClockOffsets
from tandem.router.requests.tracker import EMBEDDED, RequestReport
from tandem.router.workers.leans import LEANS
from tandem.router.workers.placement import Placement
from tandem.router.workers.worker import Pair
from tandem.router.workers.worker_registry import WorkerRegistry

PLACED = get_args(Placement)
UNEXPLAINED = "none"
# The model's two ends, the end of a prompt that is only embedded, the client's leaving, and the classes of
# router/errors.py.
OUTCOMES = (
    *("stop", "length", EMBEDDED, "abort"),
    *("invalid", "unauthenticated", "overloaded", "unavailable", "timeout", "error"),
)
# Kinds of losses of a worker.
FAULTS = ("disconnected", "reconnected", "silent", "stalled")
# Results of ordered moves.
MOVE_RESULTS = ("moved", *MOVE_REFUSALS)
# Reports of workers on their caches: changed pages, whole reports, and gaps in the order.
PREFIX_EVENTS = ("stored", "removed", "whole", "missed")


class RouterMetrics(Collector):
    """Filled and read on the router's loop."""

    def __init__(
        self,
        registry: WorkerRegistry,
        num_requests: Callable[[], int],
        num_queued: Callable[[], int],
        num_waiting: Callable[[], int],
        not_ready_reason: Callable[[], str],
        *,
        clocks: ClockOffsets,
        planned: Mapping[str, str],
        num_restarts: int,
    ) -> None:
        """
        Args:
            num_requests, num_queued, num_waiting: count the requests in hand; those without a first token; those that
                no worker takes.
            not_ready_reason: returns why no request can be served now, or "".
            planned: planned roles by worker name.
            num_restarts: restarts of this router.
        """
        self._registry = registry
        self._num_requests = num_requests
        self._num_queued = num_queued
        self._num_waiting = num_waiting
        self._not_ready_reason = not_ready_reason
        self._clocks = clocks
        self._planned = planned
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._restarts: Counter[str] = Counter(dict.fromkeys(get_args(AttemptFailure), 0))
        self.placements: Counter[tuple[str, str]] = Counter(
            dict.fromkeys(((placement, reason) for placement in PLACED for reason in (*REASONS, UNEXPLAINED)), 0)
        )
        self._spans_dropped = Counter(dict.fromkeys(DROP_REASONS, 0))
        self._moves = Counter(dict.fromkeys(MOVE_RESULTS, 0))
        self._faults = Counter(dict.fromkeys(FAULTS, 0))
        self._prefix_events = Counter(dict.fromkeys(PREFIX_EVENTS, 0))
        self._num_unknown_fields = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_cached_tokens = 0
        self._loaded = NO_HITS
        ttft = HistogramFamily("tandem_ttft_seconds", "Time to first token.", TTFT_SECONDS)
        e2e = HistogramFamily("tandem_e2e_seconds", "Time from a request's arrival to its end.", E2E_SECONDS)
        phases = HistogramFamily(
            "tandem_phase_seconds",
            "Phases of a request's life.",
            PHASE_SECONDS,
            "phase",
            [spec.name for spec in PHASES if spec.name not in TOTALS],
        )
        itl = HistogramFamily("tandem_itl_seconds", "Gaps between tokens.", ITL_SECONDS)
        worker_wait = HistogramFamily(
            "tandem_worker_wait_seconds",
            "Wait for a worker, of the requests that had to wait.",
            PHASE_SECONDS,
        )
        moves = HistogramFamily(
            "tandem_move_seconds",
            "Time from the order of a stream's move to its first step at the other worker.",
            PHASE_SECONDS,
        )
        prompt = HistogramFamily("tandem_request_prompt_tokens", "Prompt tokens of each request that ended.", TOKENS)
        output = HistogramFamily("tandem_request_generated_tokens", "Output tokens of each request that ended.", TOKENS)
        estimates = HistogramFamily(
            "tandem_ttft_estimate_ratio",
            "Time from the choice of workers to the first token, divided by the routing policy's estimate.",
            RATIOS,
            "placement",
            PLACED,
        )
        self._estimates = estimates.by_value
        self._families = (ttft, e2e, phases, itl, worker_wait, moves, prompt, output, estimates)
        self._phases = {**phases.by_value, "ttft": ttft.only, "e2e": e2e.only}
        self.itl, self.worker_wait, self.move_seconds = itl.only, worker_wait.only, moves.only
        self._prompt_tokens, self._generated_tokens = prompt.only, output.only
        self._gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._more: list[Callable[[], Iterable[Metric]]] = []
        self._prometheus = process_registry(num_restarts)
        self._prometheus.register(self)

    def add_families(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Args: families: called at each scrape."""
        self._more.append(families)

    def add_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Args: value: called at each scrape."""
        self._gauges.append((name, text, value))

    def request_refused(self, outcome: str) -> None:
        self._outcomes[outcome] += 1

    def unknown_fields(self, num_fields: int) -> None:
        self._num_unknown_fields += num_fields

    def request_ended(self, report: RequestReport) -> None:
        num_prompt_tokens = report.num_prompt_tokens
        self._outcomes[report.outcome] += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += report.num_cached_tokens
        self._loaded = self._loaded.plus(report.loaded)
        self._num_generated_tokens += report.num_generated_tokens
        self._prompt_tokens.observe(num_prompt_tokens)
        if not report.tracker.embeds:
            self._generated_tokens.observe(report.num_generated_tokens)
        for timing in report.timings:
            self._phases[timing.name].observe(timing.duration_ms / 1e3)

    def attempt_placed(self, pair: Pair) -> None:
        reason = pair.estimate.reason if pair.estimate is not None and pair.estimate.reason else UNEXPLAINED
        self.placements[pair.placement, reason] += 1

    def first_token_came(self, pair: Pair, moments: Mapping[str, int]) -> None:
        if pair.estimate is None or not pair.estimate.ttft_s or not moments.keys() >= {ASSIGNED, FIRST_TOKEN}:
            return
        took_s = max(0, moments[FIRST_TOKEN] - moments[ASSIGNED]) / 1e9
        self._estimates[pair.placement].observe(took_s / pair.estimate.ttft_s)

    def attempt_restarted(self, kind: str) -> None:
        self._restarts[kind] += 1

    def move_ended(self, result: str) -> None:
        """Args: result: one of MOVE_RESULTS."""
        self._moves[result] += 1

    def spans_dropped(self, reason: str, num_requests: int) -> None:
        self._spans_dropped[reason] += num_requests

    def prefixes_received(self, message: CachedPrefixes, *, is_in_order: bool) -> None:
        """Args: is_in_order: False if an earlier message is missing."""
        if message.is_whole:
            self._prefix_events["whole"] += 1
        if not is_in_order:
            self._prefix_events["missed"] += 1
        self._prefix_events["stored"] += len(message.stored) // IDENTITY_BYTES
        self._prefix_events["removed"] += len(message.removed) // IDENTITY_BYTES

    def fault(self, kind: str) -> None:
        self._faults[kind] += 1

    def exposition(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        histograms = "".join([family.exposition() for family in self._families])
        return generate_latest(self._prometheus) + histograms.encode()

    def collect(self) -> Iterable[Metric]:
        yield _counter("tandem_requests", "Requests by outcome", ("outcome",), self._outcomes)
        yield CounterMetricFamily(
            "tandem_unknown_fields",
            "Unknown fields of accepted HTTP requests",
            value=self._num_unknown_fields,
        )
        yield CounterMetricFamily(
            "tandem_prompt_tokens", "Prompt tokens of ended requests", value=self._num_prompt_tokens
        )
        yield CounterMetricFamily(
            "tandem_cached_prompt_tokens",
            "Prompt tokens of ended requests that prefill found cached, as reported to clients",
            value=self._num_cached_tokens,
        )
        yield _counter(
            "tandem_prompt_hit_tokens",
            "Those of tandem_cached_prompt_tokens, by the tier that held them",
            ("tier",),
            self._loaded.among(self._num_cached_tokens),
        )
        yield CounterMetricFamily(
            "tandem_generated_tokens", "Output tokens passed on to clients", value=self._num_generated_tokens
        )
        placements = CounterMetricFamily(
            "tandem_placements",
            "Attempts by placement, on one worker or two, and by reason",
            labels=("placement", "reason"),
        )
        for labels, count in sorted(self.placements.items()):
            placements.add_metric(labels, count)
        yield placements
        yield _counter("tandem_restarts", "Attempts after a request's first, by reason", ("kind",), self._restarts)
        yield _counter("tandem_moves", "Ordered moves of running streams, by result", ("result",), self._moves)
        yield _counter("tandem_faults", "Workers that the router lost, by kind of loss", ("kind",), self._faults)
        yield _counter(
            "tandem_spans_dropped",
            "Requests whose spans did not reach the collector of traces, by reason",
            ("reason",),
            self._spans_dropped,
        )
        yield GaugeMetricFamily("tandem_requests_in_hand", "Requests being served", value=self._num_requests())
        yield GaugeMetricFamily(
            "tandem_requests_queued", "Requests in hand that wait for their first token", value=self._num_queued()
        )
        yield GaugeMetricFamily(
            "tandem_requests_waiting", "Requests in hand that no worker takes now", value=self._num_waiting()
        )
        roles = Counter(worker.role for worker in self._registry)
        workers = GaugeMetricFamily("tandem_workers", "Connected workers", labels=("role",))
        for role in ROLES:
            workers.add_metric((role,), roles[role])
        yield workers
        connected = GaugeMetricFamily(
            "tandem_worker_connected",
            "1 if this worker of the cluster is connected to the router, else 0",
            labels=("role", "worker"),
        )
        here = {worker.worker_id: worker.role for worker in self._registry}
        for worker_id, its_role in sorted({**self._planned, **here}.items()):
            connected.add_metric((its_role, worker_id), worker_id in here)
        yield connected
        leaning = Counter(w.lean for w in self._registry if w.role == "both" and w.hello.has_links)
        leans = GaugeMetricFamily(
            "tandem_leaning_workers",
            "Connected workers that both prefill and decode, by the work that they get first",
            labels=("lean",),
        )
        for lean in LEANS:
            leans.add_metric((lean,), leaning[lean])
        yield leans
        yield CounterMetricFamily(
            "tandem_lean_changes",
            "Changes of the work that a connected worker gets first",
            value=self._registry.num_lean_changes,
        )
        offsets, uncertainties = (
            GaugeMetricFamily(f"tandem_clock_{name}_seconds", text, labels=("role", "worker"))
            for name, text in (
                ("offset", "Lead of a connected worker's clock over the router's"),
                ("uncertainty", "Largest possible error of tandem_clock_offset_seconds"),
            )
        )
        for worker_id, its_role in sorted(here.items()):
            if (uncertainty_ns := self._clocks.uncertainty_ns(worker_id)) is not None:
                offsets.add_metric((its_role, worker_id), self._clocks.offset_ns(worker_id) / 1e9)
                uncertainties.add_metric((its_role, worker_id), uncertainty_ns / 1e9)
        yield from (offsets, uncertainties)
        prefixes = GaugeMetricFamily(
            "tandem_known_prefix_pages",
            "Cached pages of a connected worker that the router knows",
            labels=("role", "worker"),
        )
        for worker in sorted(self._registry, key=lambda worker: worker.worker_id):
            prefixes.add_metric((worker.role, worker.worker_id), len(worker.prefixes.identities))
        yield prefixes
        yield _counter(
            "tandem_prefix_events", "Reports of workers on their caches, by kind", ("kind",), self._prefix_events
        )
        yield GaugeMetricFamily(
            "tandem_worker_pairs",
            "Pairs of connected workers that can serve a request together; fewer than all pairs while links are down",
            value=self._registry.num_pairs,
        )
        yield GaugeMetricFamily(
            "tandem_wanted_worker_pairs",
            "Pairs of connected workers that could serve a request together if every link that they keep were up",
            value=self._registry.num_wanted_pairs,
        )
        for families in self._more:
            yield from families()
        for name, text, value in self._gauges:
            yield GaugeMetricFamily(name, text, value=value())
        yield GaugeMetricFamily("tandem_ready", "1 if a request can be served now", value=not self._not_ready_reason())


def _counter(name: str, text: str, labels: Sequence[str], values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label, value in sorted(values.items()):
        family.add_metric((label,), value)
    return family

"""Prometheus metrics of a worker, listed in docs/metrics.md."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.engine.expert_balance import BOUNDS, ExpertBalance
from tandem.messages import Drafted, ForwardTimes, Heartbeat
from tandem.process_metrics import process_registry


class WorkerCollector(Collector):
    """Converts the worker's latest heartbeat to metrics, on any thread: heartbeats are immutable."""

    def __init__(
        self,
        role: str,
        worker_id: str,
        heartbeat: Callable[[], Heartbeat],
        experts: ExpertBalance | None,
        is_store_up: Callable[[], bool] | None,
        num_ranks: int,
    ) -> None:
        """Args: as for `worker_registry`."""
        self._role = role
        self._worker_id = worker_id
        self._heartbeat = heartbeat
        self._experts = experts
        self._is_store_up = is_store_up
        self._num_ranks = num_ranks

    def collect(self) -> Iterator[Metric]:
        heartbeat = self._heartbeat()
        stats = heartbeat.stats
        pages = GaugeMetricFamily(
            "tandem_kv_pages", "Pages of the worker's KV pool by state.", labels=("role", "worker", "state")
        )
        for state, num_pages in (
            ("free", stats.num_free_pages),
            ("cached", stats.num_cached_pages),
            ("locked", stats.num_locked_pages),
            ("leased", stats.num_leased_pages),
        ):
            pages.add_metric((self._role, self._worker_id, state), num_pages)
        yield pages
        if self._is_store_up is not None:
            yield self._gauge(
                "worker_store_up", "0 while the worker serves without the page store.", self._is_store_up()
            )
        yield self._gauge("worker_queue_length", "Requests that wait for their turn or for pages.", stats.num_queued)
        yield self._gauge("worker_running_requests", "Requests being computed or handed over.", stats.num_running)
        yield self._gauge("worker_ranks", "Processes that share the worker's model.", self._num_ranks)
        yield self._counter("worker_steps", "Turns of the scheduler loop, including idle ones.", heartbeat.step)
        yield self._counter(
            "prefix_cached_tokens",
            "Prompt tokens found in the worker's radix tree.",
            stats.prefix_cached_tokens,
        )
        hits = CounterMetricFamily(
            "tandem_prefix_hit_tokens",
            "Those of tandem_prefix_cached_tokens, by the tier that held them.",
            labels=("role", "worker", "tier"),
        )
        for tier, num_tokens in stats.prefix_loaded.among(stats.prefix_cached_tokens).items():
            hits.add_metric((self._role, self._worker_id, tier), num_tokens)
        yield hits
        yield self._counter(
            "prefill_computed_tokens", "Prompt tokens computed by the worker.", stats.prompt_tokens_computed
        )
        yield self._counter(
            "decode_computed_tokens", "Output tokens whose KV the worker computed.", stats.output_tokens_computed
        )
        yield self._counter("given_back", "Running requests given back for lack of pages.", stats.num_given_back)
        yield self._counter("leases_expired", "Granted leases that expired.", stats.num_leases_expired)
        adapters = GaugeMetricFamily(
            "tandem_worker_adapters", "LoRA adapters of the worker by place.", labels=("role", "worker", "place")
        )
        adapters.add_metric((self._role, self._worker_id, "device"), stats.num_adapters_on_device)
        adapters.add_metric((self._role, self._worker_id, "host"), stats.num_adapters_in_host)
        yield adapters
        yield self._counter("adapter_loads", "Loads of adapters from files or from memory.", stats.num_adapter_loads)
        yield self._counter("adapter_load_seconds", "Time of these loads.", stats.adapter_load_ns / 1e9)
        yield from self._forward_times(stats.forward_times)
        yield from self._drafts(stats.drafted)
        if self._experts is not None:
            yield from self._balance(self._experts)
        labels = ("transport", "worker")
        shipped_pages = CounterMetricFamily("tandem_kv_shipped_pages", "KV pages sent to other workers.", labels=labels)
        shipped_bytes = CounterMetricFamily("tandem_kv_shipped_bytes", "Bytes of these pages.", labels=labels)
        copying = CounterMetricFamily(
            "tandem_kv_copying_seconds", "Time during which at least one copy of a link was in flight.", labels=labels
        )
        # Dashboards group by transport only.
        for transport in dict.fromkeys(shipped.transport for shipped in stats.shipped):
            own = [shipped for shipped in stats.shipped if shipped.transport == transport]
            shipped_pages.add_metric((transport, self._worker_id), sum(shipped.num_pages for shipped in own))
            shipped_bytes.add_metric((transport, self._worker_id), sum(shipped.num_bytes for shipped in own))
            copying.add_metric((transport, self._worker_id), sum(shipped.copying_ns for shipped in own) / 1e9)
        yield shipped_pages
        yield shipped_bytes
        yield copying

    def _drafts(self, drafted: Sequence[Drafted]) -> Iterator[Metric]:
        labels = ("role", "worker", "source")
        proposals = CounterMetricFamily(
            "tandem_proposals", "Drafts of one request in one decode step, together.", labels=labels
        )
        drafts = CounterMetricFamily("tandem_drafted_tokens", "Drafts in these proposals.", labels=labels)
        accepted = CounterMetricFamily("tandem_accepted_tokens", "Drafts that the sampler chose too.", labels=labels)
        lengths = HistogramMetricFamily("tandem_accepted_length", "Accepted drafts of each proposal.", labels=labels)
        for one in drafted:
            key = (self._role, self._worker_id, one.source)
            proposals.add_metric(key, one.num_proposals)
            drafts.add_metric(key, one.num_tokens)
            accepted.add_metric(key, one.num_accepted)
            up_to = [*accumulate(one.num_by_length)]
            # The last bucket has all longer ones too.
            bounds = [*map(floatToGoString, range(len(up_to) - 1)), "+Inf"]
            lengths.add_metric(key, [*zip(bounds, up_to, strict=True)], one.num_accepted)
        yield proposals
        yield drafts
        yield accepted
        yield lengths

    def _forward_times(self, times: ForwardTimes) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "tandem_forward_time_seconds",
            "Fitted duration of the parts of a forward pass.",
            labels=("role", "worker", "part"),
        )
        for part, seconds in (
            ("prefill", times.prefill_s),
            ("prompt_token", times.prompt_token_s),
            ("attended_token", times.attended_token_s),
            ("decode_step", times.step_s),
            ("request", times.request_s),
            ("kv_token", times.kv_token_s),
        ):
            family.add_metric((self._role, self._worker_id, part), seconds)
        yield family
        yield self._gauge(
            "itl_beside_prefill_seconds",
            "Mean time between decode steps with prompts between or in them; 0 if there were none lately.",
            times.gap_beside_prompts_s,
        )

    def _balance(self, experts: ExpertBalance) -> Iterator[Metric]:
        labels = ("role", "worker", "layers")
        tokens = CounterMetricFamily("tandem_expert_tokens", "Tokens computed by each expert, summed.", labels=labels)
        imbalance = HistogramMetricFamily(
            "tandem_expert_imbalance", "Tokens of a layer's busiest expert over the mean of its experts.", labels=labels
        )
        bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
        for group in experts.groups:
            values = (self._role, self._worker_id, group.layers)
            tokens.add_metric(values, group.num_tokens)
            imbalance.add_metric(values, list(zip(bounds, group.num_within, strict=True)), group.total)
        yield tokens
        yield imbalance

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"tandem_{name}", documentation, labels=("role", "worker"))
        family.add_metric((self._role, self._worker_id), value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tandem_{name}", documentation, labels=("role", "worker"))
        family.add_metric((self._role, self._worker_id), value)
        return family


def worker_registry(
    role: str,
    worker_id: str,
    heartbeat: Callable[[], Heartbeat],
    num_restarts: int = 0,
    experts: ExpertBalance | None = None,
    is_store_up: Callable[[], bool] | None = None,
    num_ranks: int = 1,
) -> CollectorRegistry:
    """
    Args:
        experts: None without mixtures of experts.
        is_store_up: whether the worker uses its node's page store; None: the cluster has none.
    """
    registry = process_registry(num_restarts)
    registry.register(WorkerCollector(role, worker_id, heartbeat, experts, is_store_up, num_ranks))
    return registry

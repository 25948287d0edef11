"""Metrics of the numbers of processes that follow the load. All routers export the same values."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.router.workers.sizes import ClusterSize, KindSize

_GAUGES = (
    ("tandem_target_processes", "Processes that the planner wants", lambda kind: kind.target),
    ("tandem_least_processes", "Lower bound of the number of processes", lambda kind: kind.low),
    ("tandem_most_processes", "Upper bound of the number of processes", lambda kind: kind.high),
    ("tandem_ready_processes", "Planned processes that serve", lambda kind: kind.ready),
    ("tandem_starting_processes", "Planned processes that do not serve yet", lambda kind: kind.starting),
    ("tandem_leaving_processes", "Processes that drain", lambda kind: kind.leaving),
    ("tandem_start_duration_seconds", "Time of the latest start, or a guess before one", lambda kind: kind.start_s),
    ("tandem_no_room", "1 if the planner wants more processes than there is room for", lambda kind: bool(kind.no_room)),
)


def size_metrics(size: ClusterSize | None) -> Iterator[Metric]:
    """Yields families without samples while no number follows the load."""
    kinds: dict[str, KindSize] = dict(size.kinds) if size is not None else {}
    for name, text, value in _GAUGES:
        family = GaugeMetricFamily(name, f"{text}, by kind", labels=("kind",))
        for kind, state in kinds.items():
            family.add_metric((kind,), value(state))
        yield family
    changes = CounterMetricFamily(
        "tandem_size_changes",
        "Processes that the planner added or drained, by kind, direction and reason",
        labels=("kind", "direction", "reason"),
    )
    for labels, count in (size.num_changes if size is not None else {}).items():
        changes.add_metric(labels, count)
    yield changes

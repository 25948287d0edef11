"""One load of `tandem bench` on one cluster."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console

from benchmarks.served import within
from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.command import measure
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.measures import distribution
from tandem.bench.records import GROUPS, RequestRecord


class LoadError(Exception):
    """Not all requests of a load have a whole answer, so it has no figures."""


def run_load(
    address: str, workload: WorkloadConfig, arrivals: ArrivalConfig, label: str, timeout_s: float
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """The result, and the records of the requests and streams that it is of.

    Raises:
        TimeoutError: it is not over within `timeout_s`.
        LoadError: a request has no whole answer.
    """
    config = BenchConfig(EndpointConfig(f"grpc://{address}", timeout_s=timeout_s), workload, arrivals, label=label)
    with within(timeout_s, label):
        result, run = measure(config, Console(quiet=True))
    requests = result["requests"]
    if requests["num_whole"] < requests["num_requests"]:
        raise LoadError(
            f"{label}: {requests['num_whole']} of {requests['num_requests']} requests were whole; "
            f"{requests['error_examples']}"
        )
    return result, run.records


def phase_means(records: Iterable[RequestRecord]) -> dict[str, float]:
    """What each phase took on average over the requests, in milliseconds; requests that lack one count as 0 there."""
    timed = [record.phases_ms for record in records if record.group == "requests" and not record.error]
    names = dict.fromkeys(name for phases in timed for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in timed) / len(timed) for name in names}


def gaps_before(records: Iterable[RequestRecord], moment_s: float) -> dict[str, Any] | None:
    """The distribution of the streams' gaps that ended before that moment, in seconds."""
    return distribution(
        after - before
        for record in records
        if record.group == "streams"
        for before, after in pairwise(record.times)
        if after < moment_s
    )


def answers(records: Iterable[RequestRecord]) -> list[str]:
    """Digests of the answers, in the order of the workload."""
    return [record.output_digest for record in sorted(records, key=lambda one: one.index)]


def cached_share(records: Sequence[RequestRecord]) -> float:
    """Of the prompts' tokens, the share that prefill found in its cache."""
    num_tokens = sum(record.prompt_tokens or record.wanted_input_tokens for record in records)
    return sum(record.cached_tokens or 0 for record in records) / num_tokens


def slim(result: dict[str, Any], *, keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """A result without its settings, and without what only plots need.

    Args: keep: what is needed of that: "series", and measures of the requests whose curve is.
    """
    kept = {key: value for key, value in result.items() if key not in ({"config", "series"} - set(keep))}
    for group in (*GROUPS, "client"):
        if group in kept:
            kept[group] = {
                name: {key: inner for key, inner in value.items() if key != "curve" or (group, name) in _curves(keep)}
                if isinstance(value, dict)
                else value
                for name, value in kept[group].items()
            }
    return kept


def _curves(keep: tuple[str, ...]) -> set[tuple[str, str]]:
    return {("requests", name) for name in keep}

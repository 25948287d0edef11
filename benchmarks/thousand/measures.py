"""What a cluster of one size costs: its start, a second under load, and single operations."""

import asyncio
import gc
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from benchmarks.thousand.cluster import Cluster
from benchmarks.thousand.costs import Cost
from tandem.deploy.cli.status_tables import print_status
from tandem.router.frontends.grpc import InferenceService
from tandem.v1 import inference_pb2 as pb

JOIN_S = 10.0
# A longer table takes minutes.
MAX_STATUS_ROWS = 25_000
FROM_WORKERS, TO_WORKERS = "from workers: ", "to workers: "


class Measure(NamedTuple):
    """Attributes: name: what was measured; unit: of the value."""

    name: str
    unit: str
    value: float


def run(num_workers: int, num_routers: int, linked: bool, routing: str, rate: float, load_s: float) -> list[Measure]:
    """Args: linked: workers of `--workers`; rate: requests per second and worker; load_s: virtual time under load."""
    # A collection of millions of objects would count as some call's CPU time.
    gc.disable()
    cluster = Cluster(num_workers, num_routers, linked=linked, routing=routing, rate=rate * num_workers)
    return list(measure(cluster, load_s))


def measure(cluster: Cluster, load_s: float) -> Iterator[Measure]:
    yield from _start(cluster)
    yield from _load(cluster, load_s)
    yield from _pages(cluster)
    yield from _changes(cluster)


def _start(cluster: Cluster) -> Iterator[Measure]:
    cluster.connect(JOIN_S)
    costs = cluster.watched_costs.take()
    peers = _sum(costs, TO_WORKERS + "Peer")
    yield Measure("start: peers sent by a router", "MB", peers.num_bytes / 1e6)
    yield Measure(
        "start: CPU of a router for Hello and peers", "s", peers.cpu_s + _sum(costs, FROM_WORKERS + "Hello").cpu_s
    )
    at_worker = _sum(cluster.of_worker.take(), "at a worker: Peer")
    yield Measure("start: CPU of a worker for its peers", "s", at_worker.cpu_s)
    begun = time.thread_time()
    cluster.new_workers[1].routers._keep_links()
    yield Measure("a worker's look at its peers, twice a second", "ms", 1e3 * (time.thread_time() - begun))
    cluster.open_links()
    links = _sum(cluster.watched_costs.take(), FROM_WORKERS + "LinkState")
    yield Measure("start: links", "1,000", sum(len(w.links) for w in cluster.workers.values()) / 1e3)
    yield Measure("start: link states to a router", "MB", links.num_bytes / 1e6)
    yield Measure("start: CPU of a router for link states", "s", links.cpu_s)


def _load(cluster: Cluster, seconds: float) -> Iterator[Measure]:
    cluster.begin_load()
    # Enough for the first requests to end.
    cluster.run(1.0)
    cluster.watched_costs.take()
    cluster.run(seconds)
    costs = cluster.watched_costs.take()
    # Calls that are no message of their own.
    inbound, outbound = _sum(costs, FROM_WORKERS), _sum(costs, TO_WORKERS)
    yield Measure("CPU of a router, without gRPC", "%", 100 * sum(cost.cpu_s for cost in costs.values()) / seconds)
    for name in ("Heartbeat", "Tokens", "CachedPrefixes", "ClockReply"):
        yield Measure(f"  {name}", "%", 100 * _sum(costs, FROM_WORKERS + name).cpu_s / seconds)
    for name in ("from routers", "to routers", "submit a request", "look at deadlines", "sample for the page"):
        yield Measure(f"  {name}", "%", 100 * _sum(costs, name).cpu_s / seconds)
    yield Measure("messages from workers", "1,000/s", inbound.num / seconds / 1e3)
    yield Measure("  bytes", "MB/s", inbound.num_bytes / seconds / 1e6)
    yield Measure("messages to workers", "1,000/s", outbound.num / seconds / 1e3)
    yield Measure("from routers: bytes", "MB/s", _sum(costs, "from routers").num_bytes / seconds / 1e6)
    yield Measure("requests of a router", "/s", costs["submit a request"].num / seconds)
    for name in ("submit a request", FROM_WORKERS + "Heartbeat", "look at deadlines", "from routers", "exchange leans"):
        yield Measure(f"each: {name.removeprefix(FROM_WORKERS)}", "ms", _sum(costs, name).ms)
    plan = cluster.of_supervisor.take()["plan of roles"]
    yield Measure("plan of roles", "ms", plan.ms)
    yield Measure("  exchanged with all routers", "kB", plan.num_bytes / plan.num / 1e3)


def _pages(cluster: Cluster) -> Iterator[Measure]:
    watched = cluster.watched
    page, ms = _timed(watched.router.metrics.exposition)
    yield from _both("metrics page", len(page), ms)
    info, ms = _timed(lambda: _server_info(InferenceService(watched.frontend)))
    yield from _both("server info", info.ByteSize(), ms)
    if sum(len(worker.stats.shipped) for worker in info.workers) > MAX_STATUS_ROWS:
        yield from _both("tandem status", math.nan, math.nan)
    else:
        with redirect_stdout(io.StringIO()) as text:
            _, ms = _timed(lambda: print_status(info))
        yield from _both("tandem status", len(text.getvalue()), ms)
    frame, ms = _timed(lambda: watched.frames.changes().seen_by(""))
    yield from _both("frame of the live page", len(frame), ms)


def _changes(cluster: Cluster) -> Iterator[Measure]:
    router = cluster.watched.router
    roles = {worker.worker_id: worker.role for worker in cluster.new_workers}
    router.set_workers(roles)
    left_out = cluster.new_workers[2].worker_id
    _, ms = _timed(lambda: router.set_workers({name: role for name, role in roles.items() if name != left_out}))
    yield Measure("one worker leaves the plan", "ms", ms)
    router.set_workers(roles)
    cluster.settle()
    cluster.watched_costs.take()
    lost = cluster.new_workers[0]
    del cluster.workers[lost.worker_id]
    registered = lost.streams[0].registered
    assert registered is not None
    num_requests = registered.assigned_here.num_requests
    _, ms = _timed(lambda: router.lose_worker(registered, "disconnected", "killed"))
    yield Measure("a worker is lost", "ms", ms)
    yield Measure("  its requests at this router", "", num_requests)
    cluster.run(1.0)
    costs = cluster.watched_costs.take()
    yield Measure("  peers sent", "MB", _sum(costs, TO_WORKERS + "Peer").num_bytes / 1e6)


def _both(name: str, num_bytes: float, ms: float) -> Iterator[Measure]:
    yield Measure(name, "ms", ms)
    yield Measure(f"{name}: size", "kB", num_bytes / 1e3)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.thread_time()
    value = call()
    return value, 1e3 * (time.thread_time() - begun)


def _server_info(service: InferenceService) -> pb.ServerInfo:
    call: Any = service.GetServerInfo(pb.GetServerInfoRequest(), None)
    return asyncio.run(call)


def _sum(costs: Mapping[str, Cost], prefix: str) -> Cost:
    total = Cost()
    for name, cost in costs.items():
        if name.startswith(prefix):
            total.num += cost.num
            total.num_bytes += cost.num_bytes
            total.cpu_s += cost.cpu_s
    return total

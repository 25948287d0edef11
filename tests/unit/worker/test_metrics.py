import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from typing import Any

import pytest
import torch
import uvloop
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem import __version__
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.expert_balance import BOUNDS, READ_INTERVAL_S, ExpertBalance
from tandem.engine.layers.experts.counts import ExpertCounts
from tandem.messages import Drafted, ForwardTimes, Heartbeat, Shipped, WorkerStats
from tandem.rpc import metrics_server
from tandem.rpc.metrics_server import MetricsServer
from tandem.worker.metrics import worker_registry
from tests.fakes.clock import FakeClock
from tests.fakes.workers import WorkerPair

STATS = WorkerStats(
    num_queued=1,
    num_running=2,
    num_total_pages=100,
    num_free_pages=40,
    num_cached_pages=30,
    num_locked_pages=20,
    num_leased_pages=10,
    prompt_tokens_computed=500,
    output_tokens_computed=60,
    prefix_cached_tokens=96,
    prefix_host_tokens=32,
    prefix_disk_tokens=16,
    num_given_back=3,
    drafted=(Drafted("ngram", 5, 18, 9, (1, 0, 2, 0, 0, 1, 0, 0)),),
    num_leases_expired=4,
    num_adapters_on_device=2,
    num_adapters_in_host=5,
    num_adapter_loads=7,
    adapter_load_ns=1_500_000_000,
    shipped=(
        Shipped("shared_memory", 4, 4 * 4096, "decode-1", 1_000_000_000),
        Shipped("tcp", 2, 2 * 4096, "decode-1"),
        Shipped("shared_memory", 3, 3 * 4096, "decode-2", 500_000_000),
    ),
    forward_times=ForwardTimes(1e-3, 2e-6, 3e-9, 4e-3, 5e-6, 6e-9, 7e-3),
)
# Of buckets that hold the value 3.
LENGTH_BOUNDS = ("0.0", "1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "+Inf")
LATER_BOUNDS = ("3.0", "4.0", "6.0", "8.0", "16.0", "32.0", "64.0", "+Inf")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sample(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.mark.parametrize("is_up", [True, False])
def test_a_worker_says_whether_it_uses_the_page_store(is_up: bool) -> None:
    for is_store_up, shown in ((lambda: is_up, {float(is_up)}), (None, set())):
        registry = worker_registry("both", "w", lambda: Heartbeat(17, STATS), is_store_up=is_store_up)
        found = samples(generate_latest(registry).decode())
        assert {value for (name, _), value in found.items() if name == "tandem_worker_store_up"} == shown


def test_worker_exports_its_stats() -> None:
    registry = worker_registry("decode", "decode-0", lambda: Heartbeat(17, STATS), num_restarts=2, num_ranks=4)
    worker = {"role": "decode", "worker": "decode-0"}
    found = samples(generate_latest(registry).decode())
    own = {key: value for key, value in found.items() if not key[0].startswith("process_")}
    assert found[sample("process_resident_memory_bytes")] > 2**20
    assert own == {
        sample("tandem_worker_adapters", **worker, place="device"): 2,
        sample("tandem_worker_adapters", **worker, place="host"): 5,
        sample("tandem_adapter_loads_total", **worker): 7,
        sample("tandem_adapter_load_seconds_total", **worker): 1.5,
        sample("tandem_build_info", version=__version__): 1,
        sample("tandem_process_restarts_total"): 2,
        sample("tandem_decode_computed_tokens_total", **worker): 60,
        sample("tandem_kv_pages", state="free", **worker): 40,
        sample("tandem_kv_pages", state="cached", **worker): 30,
        sample("tandem_kv_pages", state="locked", **worker): 20,
        sample("tandem_kv_pages", state="leased", **worker): 10,
        sample("tandem_worker_queue_length", **worker): 1,
        sample("tandem_worker_running_requests", **worker): 2,
        sample("tandem_worker_ranks", **worker): 4,
        sample("tandem_worker_steps_total", **worker): 17,
        sample("tandem_prefix_cached_tokens_total", **worker): 96,
        sample("tandem_prefix_hit_tokens_total", tier="pool", **worker): 48,
        sample("tandem_prefix_hit_tokens_total", tier="host", **worker): 32,
        sample("tandem_prefix_hit_tokens_total", tier="disk", **worker): 16,
        sample("tandem_prefix_hit_tokens_total", tier="peer", **worker): 0,
        sample("tandem_prefill_computed_tokens_total", **worker): 500,
        sample("tandem_given_back_total", **worker): 3,
        sample("tandem_leases_expired_total", **worker): 4,
        sample("tandem_proposals_total", source="ngram", **worker): 5,
        sample("tandem_drafted_tokens_total", source="ngram", **worker): 18,
        sample("tandem_accepted_tokens_total", source="ngram", **worker): 9,
        **{
            sample("tandem_accepted_length_bucket", source="ngram", le=le, **worker): count
            for le, count in zip(LENGTH_BOUNDS, (1, 1, 3, 3, 3, 4, 4, 4), strict=True)
        },
        sample("tandem_accepted_length_count", source="ngram", **worker): 4,
        sample("tandem_accepted_length_sum", source="ngram", **worker): 9,
        sample("tandem_forward_time_seconds", part="prefill", **worker): 1e-3,
        sample("tandem_forward_time_seconds", part="prompt_token", **worker): 2e-6,
        sample("tandem_forward_time_seconds", part="attended_token", **worker): 3e-9,
        sample("tandem_forward_time_seconds", part="decode_step", **worker): 4e-3,
        sample("tandem_forward_time_seconds", part="request", **worker): 5e-6,
        sample("tandem_forward_time_seconds", part="kv_token", **worker): 6e-9,
        sample("tandem_itl_beside_prefill_seconds", **worker): 7e-3,
        sample("tandem_kv_shipped_pages_total", transport="shared_memory", worker="decode-0"): 7,
        sample("tandem_kv_shipped_bytes_total", transport="shared_memory", worker="decode-0"): 7 * 4096,
        sample("tandem_kv_copying_seconds_total", transport="shared_memory", worker="decode-0"): 1.5,
        sample("tandem_kv_shipped_pages_total", transport="tcp", worker="decode-0"): 2,
        sample("tandem_kv_shipped_bytes_total", transport="tcp", worker="decode-0"): 2 * 4096,
        sample("tandem_kv_copying_seconds_total", transport="tcp", worker="decode-0"): 0,
    }


def test_worker_exports_the_balance_of_experts() -> None:
    counts = ExpertCounts([1, 2], 4, 3, torch.device("cpu"))
    clock = FakeClock()
    experts = ExpertBalance(counts, clock)
    registry = worker_registry("decode", "decode-0", lambda: Heartbeat(17, STATS), experts=experts)

    def exported() -> Samples:
        found = samples(generate_latest(registry).decode())
        return {key: value for key, value in found.items() if key[0].startswith("tandem_expert")}

    before = exported()
    # All series are there from the start.
    assert len(before) == 2 * (1 + len(BOUNDS) + 3) and not any(before.values())
    counts.counts += torch.tensor([[100, 300, 0, 0], [0, 0, 0, 8]])
    clock.advance(READ_INTERVAL_S)
    for _ in range(2):
        experts.poll()
    first, second = ({"role": "decode", "worker": "decode-0", "layers": layers} for layers in ("1-1", "2-2"))
    after = exported()
    assert {key: value for key, value in after.items() if value} == {
        sample("tandem_expert_tokens_total", **first): 400,
        sample("tandem_expert_tokens_total", **second): 8,
        **{sample("tandem_expert_imbalance_bucket", le=le, **first): 1 for le in LATER_BOUNDS},
        sample("tandem_expert_imbalance_count", **first): 1,
        sample("tandem_expert_imbalance_sum", **first): 3,
    }
    assert set(after) == set(before)


def test_every_scrape_is_current() -> None:
    pair = WorkerPair()
    registry = worker_registry("prefill", "p", lambda: Heartbeat(1, pair.p.scheduler.stats()))
    name = sample("tandem_kv_shipped_pages_total", transport="shared_memory", worker="p")
    assert samples(generate_latest(registry).decode())[name] == 0
    pair.submit("a", list(range(10)))
    pair.run()
    assert samples(generate_latest(registry).decode())[name] == 3


def serve(registry: CollectorRegistry, *api_keys: str) -> Iterator[MetricsServer]:
    server = MetricsServer(registry, "127.0.0.1", api_keys)
    yield server
    server.close()


@pytest.fixture
def open_port() -> Iterator[MetricsServer]:
    yield from serve(worker_registry("prefill", "p", lambda: Heartbeat(17, STATS)))


@pytest.fixture
def guarded_port() -> Iterator[MetricsServer]:
    yield from serve(worker_registry("prefill", "p", lambda: Heartbeat(17, STATS)), "first-key", "second-key")


def ask(
    server: MetricsServer, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = HTTPConnection(server.address, timeout=5.0)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read().decode()
    finally:
        connection.close()


def test_port_without_keys_is_open(open_port: MetricsServer) -> None:
    for path in ("/metrics", "/metrics?name=all"):
        status, headers, body = ask(open_port, path)
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain; version=")
        assert samples(body)[sample("tandem_worker_steps_total", role="prefill", worker="p")] == 17


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metricsx", "/../metrics"])
def test_other_paths_do_not_exist(open_port: MetricsServer, path: str) -> None:
    assert ask(open_port, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_only_reading_is_possible(open_port: MetricsServer, method: str) -> None:
    status, headers, _ = ask(open_port, method=method)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize("authorization", ["Bearer first-key", "Bearer second-key", "bearer  first-key "])
def test_key_grants_access(guarded_port: MetricsServer, authorization: str) -> None:
    assert ask(guarded_port, Authorization=authorization)[0] == 200


@pytest.mark.parametrize(
    "authorization", ["", "first-key", "Bearer", "Bearer ", "Bearer first", "Basic first-key", "Bearer first-key,x"]
)
def test_missing_or_wrong_key_is_refused(guarded_port: MetricsServer, authorization: str) -> None:
    headers: dict[str, Any] = {"Authorization": authorization} if authorization else {}
    for path in ("/metrics", "/elsewhere"):
        status, answered, body = ask(guarded_port, path, **headers)
        assert (status, answered["WWW-Authenticate"]) == (401, "Bearer")
        assert "tandem_" not in body


def test_silent_reader_does_not_block_others(open_port: MetricsServer) -> None:
    host, _, port = open_port.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=5.0):
        assert ask(open_port)[0] == 200


def test_disconnecting_or_malformed_reader_does_no_harm(open_port: MetricsServer) -> None:
    host, _, port = open_port.address.partition(":")
    for said in (b"", b"GET /metrics HTTP/1.1\r\n", b"\x00\xff\r\n\r\n", b"GET /metrics HTTP/9.9\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5.0) as connection:
            connection.sendall(said)
    assert ask(open_port)[0] == 200


def connect(server: MetricsServer, said: bytes = b"") -> socket.socket:
    host, _, port = server.address.partition(":")
    connection = socket.create_connection((host, int(port)), timeout=10.0)
    connection.sendall(said)
    return connection


def everything(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_loop_policy_of_the_process_has_no_effect() -> None:
    """Ray sets uvloop's in actors."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        for server in serve(worker_registry("prefill", "p", lambda: Heartbeat(17, STATS))):
            assert ask(server)[0] == 200
    finally:
        asyncio.set_event_loop_policy(before)


def test_strangers_cost_no_threads_and_keep_no_reader_out(guarded_port: MetricsServer) -> None:
    before = threading.active_count()
    with ExitStack() as held:
        crowd = [held.enter_context(connect(guarded_port, b"GET /metrics HTTP/1.1\r\n")) for _ in range(300)]
        assert ask(guarded_port, Authorization="Bearer first-key")[0] == 200
        assert threading.active_count() == before
        assert everything(crowd[0]) == b"", "the oldest has made room"


def test_strangers_that_keep_coming_keep_no_reader_out(guarded_port: MetricsServer) -> None:
    stop = threading.Event()

    def besiege() -> None:
        held: deque[socket.socket] = deque()
        with suppress(OSError):
            while not stop.is_set():
                held.append(connect(guarded_port))
                if len(held) > 60:
                    held.popleft().close()
        for connection in held:
            connection.close()

    with ThreadPoolExecutor(3) as pool:
        besiegers = [pool.submit(besiege) for _ in range(3)]
        try:
            assert [ask(guarded_port, Authorization="Bearer first-key")[0] for _ in range(5)] == [200] * 5
        finally:
            stop.set()
        for one in besiegers:
            one.result()


def test_head_that_trickles_in_has_one_deadline(guarded_port: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.5)
    with connect(guarded_port, b"GET /metrics HTTP/1.1\r\n") as slow, pytest.raises(ConnectionError):
        for _ in range(500):
            slow.sendall(b"a")
            time.sleep(0.02)


def test_reader_that_does_not_read_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(metrics_server, "generate_latest", lambda registry: bytes(64 * 2**20))
    server = MetricsServer(CollectorRegistry(), "127.0.0.1")
    try:
        with connect(server, b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n") as reader:
            time.sleep(1.0)
            assert len(everything(reader)) < 64 * 2**20
    finally:
        server.close()


def test_long_head_is_refused(guarded_port: MetricsServer) -> None:
    with connect(guarded_port, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 5000) as stranger:
        assert everything(stranger).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(("num_lines", "value"), [(129, "b"), (1, "b" * metrics_server.MAX_HEAD_BYTES)])
def test_whole_head_is_refused_by_its_length(guarded_port: MetricsServer, num_lines: int, value: str) -> None:
    head = "GET /metrics HTTP/1.1\r\nHost: h\r\n" + f"a: {value}\r\n" * num_lines + "\r\n"
    with connect(guarded_port, head.encode()) as stranger:
        assert everything(stranger).startswith(b"HTTP/1.1 431")


def test_body_is_not_read(guarded_port: MetricsServer) -> None:
    """The key is refused as soon as the head is there."""
    with connect(guarded_port, b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000000\r\n\r\n") as stranger:
        assert everything(stranger).startswith(b"HTTP/1.1 401")


def test_collector_that_fails_is_an_error_of_one_answer(
    open_port: MetricsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(registry: CollectorRegistry) -> bytes:
        raise RuntimeError("no stats")

    with monkeypatch.context() as failing:
        failing.setattr(metrics_server, "generate_latest", fail)
        assert ask(open_port)[0] == 500
    assert ask(open_port)[0] == 200
    assert "no stats" in caplog.text


def test_keys_are_replaced(guarded_port: MetricsServer) -> None:
    guarded_port.set_api_keys(["third-key 5"])
    assert ask(guarded_port, Authorization="Bearer first-key")[0] == 401
    assert ask(guarded_port, Authorization="Bearer third-key")[0] == 200


def test_workers_require_the_cluster_s_keys() -> None:
    cluster = ClusterConfig("m", api_keys=("first-key",))
    worker = cluster.worker("prefill-0", "prefill", cluster.engine("m"), 1)
    assert worker.worker.api_keys == ("first-key",)
    assert "first-key" not in repr(worker)


def test_closed_port_does_not_answer() -> None:
    server = MetricsServer(CollectorRegistry(), "127.0.0.1")
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server)


def test_foreign_address_is_an_error() -> None:
    with pytest.raises(OSError):
        MetricsServer(CollectorRegistry(), "192.0.2.1")

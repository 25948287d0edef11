"""A draining cluster finishes its requests and takes no new ones."""

import asyncio
import io
import itertools
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from tandem.client import TandemClient
from tandem.deploy.serve import _drain
from tandem.messages import Abort, Admit, Finished, LeaseLost
from tandem.router.config import RouterConfig
from tandem.router.errors import UnavailableError
from tandem.router.process import RouterProcess
from tests.fakes.router_harness import RouterHarness, first_token, run, settle, step_tokens


@run
async def test_draining_router_refuses_new_requests_and_finishes_old_ones() -> None:
    h = RouterHarness()
    client = h.request(max_tokens=3)
    await settle()
    assert not h.router.not_ready_reason() and not h.router.idle.is_set()
    h.router.drain()
    assert h.router.not_ready_reason() == "the server is shutting down"
    late = h.request()
    with pytest.raises(UnavailableError, match="the server is shutting down"):
        await late.task

    request_id = client.tracker.request_id
    h.p[0].say(first_token(request_id, 0, 0, 10))
    # A new attempt is not a new request.
    h.d[0].say(LeaseLost(request_id, 0))
    await settle()
    assert [admit.attempt for admit in h.d[0].of(Admit)] == [0, 1]
    h.d[0].say(step_tokens(request_id, 1, 0, 10, 11, 12))
    h.d[0].say(Finished(request_id, 1, "length", 3, 0, 1))
    async with asyncio.timeout(1):
        await h.router.idle.wait()
    await client.task
    assert client.tokens == [10, 11, 12] and h.router.num_requests == 0


@run
async def test_shutdown_ends_remaining_requests() -> None:
    h = RouterHarness()
    client = h.request()
    await settle()
    h.router.shut_down()
    with pytest.raises(UnavailableError, match="the server is shutting down"):
        await client.task
    assert h.d[0].of(Abort) and h.p[0].of(Abort)
    assert h.router.num_requests == 0 and h.router.idle.is_set()


def test_idle_router_drains_at_once_and_reports_not_serving(router_model_dir: Path) -> None:
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0))
    try:
        address = process.start().grpc
        began = time.monotonic()
        assert process.drain(30.0) == 0
        assert time.monotonic() - began < 1.0
        with TandemClient(address) as client:
            assert client.server_info().not_ready_reason == "the server is shutting down"
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        process.stop()


class FakeCluster:
    """Reports the given numbers of remaining requests in turn, waiting where allowed."""

    def __init__(self, *num_left: int) -> None:
        self._num_left = itertools.chain(num_left, itertools.repeat(num_left[-1]))
        self.num_calls = 0

    def drain(self, timeout_s: float) -> int:
        self.num_calls += 1
        time.sleep(min(timeout_s, 0.05))
        return next(self._num_left)


class FakeGuard:
    def __init__(self, alive: bool = True) -> None:
        self._alive = alive

    def is_alive(self) -> bool:
        return self._alive


def drain(cluster: FakeCluster, timeout_s: float, guard: FakeGuard) -> str:
    console = Console(file=io.StringIO(), width=120)
    _drain(cluster, timeout_s, guard, console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_remaining_count_is_shown_when_it_changes() -> None:
    shown = drain(FakeCluster(3, 3, 3, 1, 1, 0), 30.0, FakeGuard()).splitlines()
    assert [line.partition(";")[0] for line in shown] == ["Requests left: 3", "Requests left: 1"]
    assert shown[0].endswith("waiting 30 s at most, Ctrl-C ends them now")


def test_idle_cluster_is_asked_once_without_output() -> None:
    cluster = FakeCluster(0)
    assert drain(cluster, 30.0, FakeGuard()) == ""
    assert cluster.num_calls == 1


def test_wait_ends_at_timeout_and_needs_a_guard() -> None:
    began = time.monotonic()
    assert drain(FakeCluster(2), 0.3, FakeGuard()).endswith("Requests cut short: 2\n")
    assert time.monotonic() - began < 1.0
    cluster = FakeCluster(2)
    assert drain(cluster, 30.0, FakeGuard(alive=False)) == "Requests cut short: 2\n"
    assert cluster.num_calls == 1

"""Comparison of tokens, and refusal of calls without one."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from tandem.messages import Heartbeat
from tandem.router.config import RouterConfig
from tandem.router.control_server import ControlServer
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.router import Router
from tandem.rpc import auth
from tandem.rpc.auth import CLUSTER_TOKEN_HEADER, TokenSet, bearer_token, cluster_auth, cluster_metadata
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.rpc.codec import WORKER_CODEC
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.worker.admin import WorkerAdmin
from tandem.worker.records import RecordKeeper
from tandem.worker.router_streams import RouterStreams
from tests.fakes.scripted_worker import hello

TOKEN = "the-token-of-the-cluster"
WRONG: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    "empty": ((CLUSTER_TOKEN_HEADER, ""),),
    "too short": ((CLUSTER_TOKEN_HEADER, TOKEN[:-1]),),
    "too long": ((CLUSTER_TOKEN_HEADER, TOKEN + "x"),),
    "other case": ((CLUSTER_TOKEN_HEADER, TOKEN.upper()),),
    "as an API key": (("authorization", f"Bearer {TOKEN}"),),
}
TIMEOUT_S = 10.0


@pytest.mark.parametrize("guess", ["", "a", "alph", "alpha ", "Alpha", "alphabeta", "beta\0", "grüße", "\xff"])
def test_only_a_whole_token_is_one(guess: str) -> None:
    assert guess not in TokenSet(["alpha", "beta"])


def test_any_of_the_tokens_is_one() -> None:
    assert all(token in TokenSet(["alpha", "beta"]) for token in ("alpha", "beta"))
    assert TokenSet(["alpha"]) and not TokenSet([])
    assert "" not in TokenSet([])


@pytest.mark.parametrize(
    ("authorization", "token"),
    [
        ("Bearer key", "key"),
        ("bearer  key ", "key"),
        ("BEARER key,x", "key,x"),
        ("Bearer", ""),
        ("Bearer  ", ""),
        ("key", ""),
        ("Basic key", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_the_token_of_a_header(authorization: str | None, token: str) -> None:
    assert bearer_token(authorization) == token


@pytest.mark.parametrize("guess", ["alpha", "gamma", "none of them", ""])
def test_comparison_time_is_constant(guess: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    tokens = TokenSet(["alpha", "beta-which-is-longer", "gamma"])
    monkeypatch.setattr(auth, "hmac", type("Spy", (), {"compare_digest": staticmethod(compare)}))
    assert (guess in tokens) == (guess in ("alpha", "gamma"))
    # All are compared in constant time.
    assert len(compared) == 3
    assert {len(side) for pair in compared for side in pair} == {32}


def refusal(error: grpc.aio.AioRpcError) -> str:
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    return error.details() or ""


@asynccontextmanager
async def serving(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    """Yield the address of a server that requires the cluster's token."""
    server = new_server([cluster_auth(TOKEN)])
    add(server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield address
    finally:
        await server.stop(None)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG)
def test_a_workers_port_is_closed_without_the_token(metadata: Any) -> None:
    posted: list[object] = []

    async def scenario() -> None:
        async with (
            serving(WorkerAdmin(posted.append, CollectorRegistry()).add_to) as address,
            open_channel(address) as channel,
        ):
            admin: Any = worker_pb2_grpc.WorkerAdminStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), metadata=metadata)
            assert "the cluster token is missing or wrong" in refusal(refused.value)

    run(scenario)
    assert not posted


def test_every_kind_of_call_is_refused_and_none_is_read() -> None:
    reached: list[object] = []

    def behave(*arguments: object) -> None:
        reached.append(arguments)

    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    handlers = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(behave) for kind in kinds}

    def add(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])

    async def scenario() -> None:
        async with serving(add) as address, open_channel(address) as channel:
            for kind in kinds:
                # The answer must not wait for the end of the requests.
                call: Any = getattr(channel, kind)(f"/test/{kind}")(*([b"x"] if kind.startswith("unary") else []))
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await (call.read() if kind.endswith("stream") else call)
                assert refusal(refused.value)

    run(scenario)
    assert not reached


def test_health_is_open_to_all() -> None:
    def add(server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)

    async def scenario() -> None:
        async with serving(add) as address, open_channel(address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run(scenario)


class ClusterPort:
    """A router's port for workers."""

    def __init__(self) -> None:
        self.router = Router(RouterConfig("nowhere", "fake", 64), LeastLoaded())

    def add(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_ClusterServicer_to_server(ControlServer(self.router), server)

    @property
    def worker_ids(self) -> list[str]:
        return [worker.worker_id for worker in self.router.workers]


@pytest.mark.parametrize("metadata", WRONG.values(), ids=WRONG)
def test_joining_requires_the_token(metadata: Any) -> None:
    port = ClusterPort()

    async def scenario() -> None:
        async with serving(port.add) as address, open_channel(address) as channel:
            stub: Any = worker_pb2_grpc.ClusterStub(channel)
            call = stub.Control(metadata=metadata)
            # Send nothing: gRPC's client reports a refusal during a write as INTERNAL.
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            call = stub.Control(metadata=metadata)
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                await call.write(WORKER_CODEC.encode([hello("p", "prefill")]))
                await call.read()
            assert not port.worker_ids
            call = stub.Control(metadata=cluster_metadata(TOKEN))
            await call.write(WORKER_CODEC.encode([hello("p", "prefill")]))
            await call.read()
            assert port.worker_ids == ["p"]
            call.cancel()

    run(scenario)


@pytest.mark.parametrize("token", [TOKEN, "", TOKEN[::-1]])
def test_a_worker_with_another_token_stays_out_and_gives_up(token: str) -> None:
    port = ClusterPort()
    events: list[object] = []
    joined = asyncio.Event()

    async def scenario() -> None:
        async with serving(port.add) as address:
            streams = RouterStreams(
                [address],
                hello("p", "prefill"),
                credentials=ClusterCredentials(token),
                heartbeat=lambda: Heartbeat(1),
                heartbeat_interval_s=0.1,
                connect_timeout_s=0.3,
                records=RecordKeeper(1),
                post=events.append,
                set_peers=lambda peers: None,
                on_connected=joined.set,
            )
            if token != TOKEN:
                with pytest.raises(ConnectionError, match="no router at"):
                    await streams.run()
                assert not joined.is_set() and not events and not port.worker_ids
                return
            running = asyncio.create_task(streams.run())
            await joined.wait()
            assert port.worker_ids == ["p"]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run(scenario)

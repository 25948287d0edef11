"""Limits of calls on one connection, and of connections to a port for the cluster's own processes."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess
from tandem.rpc import channel
from tandem.rpc.auth import CLUSTER_TOKEN_HEADER, cluster_auth
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.v1 import inference_pb2, inference_pb2_grpc

NUM_STREAMS = 3
# An answered call takes a few milliseconds.
IMPATIENT_S = 0.3
TIMEOUT_S = 10.0


async def model_name(connection: grpc.aio.Channel, timeout_s: float = TIMEOUT_S) -> str:
    stub = inference_pb2_grpc.InferenceStub(connection)
    return (await stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=timeout_s)).model


async def watch(connection: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall:
    """Start an endless call; return once it is running."""
    call = health_pb2_grpc.HealthStub(connection).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    await call.read()
    return call


def test_calls_beyond_the_limit_wait(router_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_STREAMS", NUM_STREAMS)
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0))

    async def scenario(address: str) -> None:
        async with open_channel(address) as full, open_channel(address) as other:
            held = [await watch(full) for _ in range(NUM_STREAMS)]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await model_name(full, IMPATIENT_S)
            assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            waiting = [asyncio.create_task(model_name(full)) for _ in range(2)]
            assert await model_name(other) == "fake", "another connection has room of its own"
            assert not any(call.done() for call in waiting)
            held[0].cancel()
            assert await asyncio.gather(*waiting) == ["fake", "fake"]

    try:
        asyncio.run(scenario(process.start().grpc))
    finally:
        process.stop()


# The client's preface and empty settings of HTTP/2.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


class Echo(health_pb2_grpc.HealthServicer):
    """A call that stays, as between processes, and one that ends."""

    async def Watch(self, request: object, context: object) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        while True:
            yield health_pb2.HealthCheckResponse()
            await asyncio.sleep(0.05)

    async def Check(self, request: object, context: object) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse()


@pytest.mark.parametrize("said", [b"", PREFACE], ids=["silent", "idle"])
def test_strangers_at_a_cluster_port_are_few_and_leave(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MAX_CLUSTER_CONNECTIONS": 10,
        "MAX_CLUSTER_IDLE_MS": 1500,
        "HANDSHAKE_TIMEOUT_MS": 1500,
    }.items():
        monkeypatch.setattr(channel, name, value)

    async def scenario() -> None:
        server = new_server([cluster_auth("token")])
        health_pb2_grpc.add_HealthServicer_to_server(Echo(), server)
        host, port = bind(server, "127.0.0.1", 0).split(":")
        await server.start()
        metadata = ((CLUSTER_TOKEN_HEADER, "token"),)
        async with open_channel(f"{host}:{port}") as own:
            call = health_pb2_grpc.HealthStub(own).Watch(health_pb2.HealthCheckRequest(), metadata=metadata)
            await call.read()
            with ExitStack() as held:
                crowd = [held.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S)) for _ in range(40)]
                for stranger in crowd:
                    stranger.sendall(said)
                # One place is ours.
                await asyncio.to_thread(wait_until, lambda: sum(map(is_open, crowd)) <= 9)
                most = sum(map(is_open, crowd))
                await asyncio.to_thread(wait_until, lambda: not any(map(is_open, crowd)))
                assert most > 0, "they were refused one by one, not all ended"
                async with open_channel(f"{host}:{port}") as late:
                    stub = health_pb2_grpc.HealthStub(late)
                    await stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=TIMEOUT_S)
            assert await call.read() is not grpc.aio.EOF
        await server.stop(None)

    asyncio.run(scenario())


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        # The server first says its settings.
        while connection.recv(1024):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

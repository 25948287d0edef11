"""The standard health service, as strangers use it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.router.frontends import health
from tandem.router.frontends.health import HealthService
from tandem.rpc.channel import bind, new_server, open_channel
from tests.fakes import raw_http2
from tests.fakes.link_ends import wait_until

Request, Response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
WATCH = "/grpc.health.v1.Health/Watch"
TIMEOUT_S = 10.0


@asynccontextmanager
async def served(service: HealthService) -> AsyncIterator[tuple[str, Any]]:
    """Yields the address and a client's stub."""
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(TIMEOUT_S), open_channel(address) as channel:
            yield address, health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(None)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_services_are_known_by_name() -> None:
    async def scenario() -> None:
        async with served(HealthService({"": True, "one": False})) as (_, stub):
            assert (await stub.Check(Request())).status == Response.SERVING
            assert (await stub.Check(Request(service="one"))).status == Response.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Check(Request(service="two"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    run(scenario)


def test_who_watches_hears_of_every_change_and_of_nothing_else() -> None:
    async def scenario() -> None:
        service = HealthService({"": True, "one": True})
        async with served(service) as (_, stub):
            watch, unknown = stub.Watch(Request(service="one")), stub.Watch(Request(service="two"))
            assert (await watch.read()).status == Response.SERVING
            assert (await unknown.read()).status == Response.SERVICE_UNKNOWN
            service.publish({"": False, "one": True})
            service.publish({"": False, "one": False})
            assert (await watch.read()).status == Response.NOT_SERVING
            with pytest.raises(TimeoutError):
                # By the protocol the call goes on: the service may become known.
                await asyncio.wait_for(unknown.read(), 0.2)

    run(scenario)


def test_so_many_watch_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WATCHES", 2)

    async def scenario() -> None:
        async with served(HealthService({"": True})) as (_, stub):
            watches = [stub.Watch(Request()) for _ in range(2)]
            for watch in watches:
                await watch.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Watch(Request()).read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.Check(Request())).status == Response.SERVING
            watches[0].cancel()
            for _ in range(100):
                watch = stub.Watch(Request())
                try:
                    assert (await watch.read()).status == Response.SERVING
                    return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
            raise AssertionError("the place of a watch that ended stays taken")

    run(scenario)


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    async def scenario() -> None:
        service = HealthService({"": True})
        async with served(service) as (address, stub):
            watch = stub.Watch(Request())
            await watch.read()
            with raw_http2.connect(address, window=0) as deaf:
                deaf.sendall(b"".join(raw_http2.call(2 * i + 1, WATCH, b"") for i in range(10)))
                await wait_until(lambda: service.num_watches == 11)
                for is_serving in (False, True, False):
                    began = time.monotonic()
                    service.publish({"": is_serving})
                    status = Response.SERVING if is_serving else Response.NOT_SERVING
                    assert (await watch.read()).status == status
                    assert (await stub.Check(Request())).status == status
                    assert (await stub.Watch(Request()).read()).status == status
                    assert time.monotonic() - began < 1.0

    run(scenario)


def test_a_client_that_never_reads_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WRITE_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        service = HealthService({"": True})
        async with served(service) as (address, stub):
            watch = stub.Watch(Request())
            await watch.read()
            with raw_http2.connect(address, window=0) as deaf:
                deaf.sendall(raw_http2.call(1, WATCH, b""))
                await wait_until(lambda: service.num_watches == 2)
                await wait_until(lambda: service.num_watches == 1)
            service.publish({"": False})
            assert (await watch.read()).status == Response.NOT_SERVING, "who reads goes on"

    run(scenario)


def test_a_slow_reader_misses_what_was_true_meanwhile() -> None:
    class SlowContext:
        def __init__(self) -> None:
            self.written: list[int] = []
            self.may_go_on = asyncio.Event()

        async def write(self, response: Any) -> None:
            self.written.append(response.status)
            await self.may_go_on.wait()

    async def scenario() -> None:
        service, context = HealthService({"": True}), SlowContext()
        watching = asyncio.create_task(service.Watch(Request(), context))
        await wait_until(lambda: bool(context.written))
        for is_serving in (False, True, False):
            service.publish({"": is_serving})
            await asyncio.sleep(0)
        context.may_go_on.set()
        await wait_until(lambda: len(context.written) == 2)
        await asyncio.sleep(0.05)
        watching.cancel()
        assert context.written == [Response.SERVING, Response.NOT_SERVING]

    run(scenario)

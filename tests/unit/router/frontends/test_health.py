"""The standard health service, as strangers use it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.router.frontends import health, watch_places
from tandem.router.frontends.health import HealthService
from tandem.router.frontends.watch_places import WatchPlaces
from tandem.rpc.channel import bind, new_server, open_channel
from tests.fakes import raw_http2
from tests.fakes.link_ends import wait_until

Request, Response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
WATCH = "/grpc.health.v1.Health/Watch"
TIMEOUT_S = 10.0


def service_of(serving: dict[str, bool]) -> HealthService:
    return HealthService(serving, WatchPlaces(lambda authorization: authorization == "Bearer secret"))


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
        async with served(service_of({"": True, "one": False})) as (_, stub):
            assert (await stub.Check(Request())).status == Response.SERVING
            assert (await stub.Check(Request(service="one"))).status == Response.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Check(Request(service="two"))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    run(scenario)


def test_who_watches_hears_of_every_change_and_of_nothing_else() -> None:
    async def scenario() -> None:
        service = service_of({"": True, "one": True})
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
    monkeypatch.setattr(watch_places, "MAX_WATCHES", 2)
    monkeypatch.setattr(watch_places, "NUM_RESERVED", 0)

    async def scenario() -> None:
        async with served(service_of({"": True})) as (_, stub):
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


async def is_admitted(stub: Any, **kwargs: Any) -> bool:
    try:
        return (await stub.Watch(Request(), **kwargs).read()) is not grpc.aio.EOF
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return False


def test_one_connection_cannot_take_the_watches_of_others() -> None:
    async def scenario() -> None:
        service = service_of({"": True})
        async with served(service) as (address, stub), open_channel(address) as other:
            held = [stub.Watch(Request()) for _ in range(100)]
            answers = await asyncio.gather(*(watch.read() for watch in held), return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
            assert len(held) - len(refused) == watch_places.MAX_WATCHES_PER_CONNECTION
            assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert await is_admitted(health_pb2_grpc.HealthStub(other))

    run(scenario)


def test_a_client_with_grpc_s_own_health_checks_gets_in_beside_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC sends no key with its checks; without an answer a client sends no requests."""
    monkeypatch.setattr(watch_places, "MAX_WATCHES_PER_ADDRESS", 12)
    config = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
    options = [("grpc.service_config", json.dumps(config)), ("grpc.use_local_subchannel_pool", 1)]

    async def is_ready(address: str, timeout_s: float) -> bool:
        async with grpc.aio.insecure_channel(address, options=options) as checked:
            stub = health_pb2_grpc.HealthStub(checked)
            try:
                return (await stub.Check(Request(), timeout=timeout_s)).status == Response.SERVING
            except grpc.aio.AioRpcError:
                return False

    async def scenario() -> None:
        service = service_of({"": True})
        async with served(service) as (address, stub):
            assert await is_ready(address, TIMEOUT_S)
            async with AsyncExitStack() as channels:
                for _ in range(20):
                    flood = health_pb2_grpc.HealthStub(await channels.enter_async_context(open_channel(address)))
                    await asyncio.gather(*(is_admitted(flood) for _ in range(watch_places.MAX_WATCHES_PER_CONNECTION)))
                    watches = [flood.Watch(Request()) for _ in range(watch_places.MAX_WATCHES_PER_CONNECTION)]
                    await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
                    channels.callback(lambda kept: None, watches)
                assert service.places.num_taken == 12, "the address has its share"
                assert await is_admitted(stub, metadata=(("authorization", "Bearer secret"),))
                assert not await is_ready(address, 1.0)
                service.places.note_key("ipv4:127.0.0.1:1")
                assert await is_ready(address, TIMEOUT_S), "requests from this address have had a key"

    run(scenario)


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    async def scenario() -> None:
        service = service_of({"": True})
        async with served(service) as (address, stub):
            watch = stub.Watch(Request())
            await watch.read()
            with raw_http2.connect(address, window=0) as deaf:
                deaf.sendall(b"".join(raw_http2.call(2 * i + 1, WATCH, b"") for i in range(8)))
                await wait_until(lambda: service.places.num_taken == 9)
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
        service = service_of({"": True})
        async with served(service) as (address, stub):
            watch = stub.Watch(Request())
            await watch.read()
            with raw_http2.connect(address, window=0) as deaf:
                deaf.sendall(raw_http2.call(1, WATCH, b""))
                await wait_until(lambda: service.places.num_taken == 2)
                await wait_until(lambda: service.places.num_taken == 1)
            service.publish({"": False})
            assert (await watch.read()).status == Response.NOT_SERVING, "who reads goes on"

    run(scenario)


def test_a_slow_reader_misses_what_was_true_meanwhile() -> None:
    class SlowContext:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        def invocation_metadata(self) -> None:
            return None

        def __init__(self) -> None:
            self.written: list[int] = []
            self.may_go_on = asyncio.Event()

        async def write(self, response: Any) -> None:
            self.written.append(response.status)
            await self.may_go_on.wait()

    async def scenario() -> None:
        service, context = service_of({"": True}), SlowContext()
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

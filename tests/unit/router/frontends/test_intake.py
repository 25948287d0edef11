"""Memory and time that gRPC requests may take, over sockets."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.client import TandemClient
from tandem.router.config import RouterConfig
from tandem.router.frontends import intake
from tandem.router.process import RouterProcess
from tandem.v1 import inference_pb2 as pb
from tests.fakes import raw_http2
from tests.fakes.attacked_router import GENERATE, KEY, AttackedRouter, attacked_router

MIB = 2**20
MAX_BYTES = 8 * MIB
WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
TIMEOUT_S = 60.0
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


@contextmanager
def router(model_dir: Path, **config: Any) -> Iterator[str]:
    """Yields the gRPC address of a router without workers."""
    process = RouterProcess(RouterConfig(str(model_dir), "fake", 64, grpc_port=0, http_port=0, **config))
    try:
        yield process.start().grpc
    finally:
        process.stop()


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code(), refused.value.details()


def test_strangers_may_send_a_few_words(router_model_dir: Path) -> None:
    with router(router_model_dir, api_keys=(KEY,)) as address, grpc.insecure_channel(address) as channel:
        check, watch = channel.unary_unary(CHECK), channel.unary_stream(WATCH)

        def named(num_bytes: int) -> bytes:
            """Returns a request of this size."""
            return health_pb2.HealthCheckRequest(service="x" * (num_bytes - 3)).SerializeToString()

        code, _ = refusal(lambda: check(named(intake.MAX_SMALL_BYTES), timeout=TIMEOUT_S))
        assert code is grpc.StatusCode.NOT_FOUND
        for call in (check, lambda *args, **kwargs: next(watch(*args, **kwargs))):
            code, message = refusal(lambda call=call: call(named(intake.MAX_SMALL_BYTES + 1), timeout=TIMEOUT_S))
            assert (code, message) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the message has 4097 bytes, more than 4096",
            )


def test_a_call_without_a_request_is_told_so(router_model_dir: Path) -> None:
    with router(router_model_dir) as address, grpc.insecure_channel(address) as channel:
        for method in (GENERATE, CHECK, "/tandem.v1.Inference/GetServerInfo"):
            call = channel.stream_unary(method)
            code, message = refusal(lambda call=call: call(iter(()), timeout=TIMEOUT_S))
            assert (code, message) == (grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request")


def test_whoever_shows_no_key_is_refused_before_the_request_is_read(router_model_dir: Path) -> None:
    with (
        router(router_model_dir, api_keys=(KEY,)) as address,
        raw_http2.connect(address) as connection,
    ):
        connection.sendall(raw_http2.call(1, GENERATE, b"x" * 1000, num_announced=MAX_BYTES))
        # A silent connection is closed with an answer too, after 10 seconds.
        connection.settimeout(5.0)
        assert raw_http2.HEADERS in raw_http2.frames_until(connection, raw_http2.HEADERS)


@pytest.mark.parametrize("method", [GENERATE, CHECK])
def test_messages_that_do_not_come_hold_up_nobody(
    router_model_dir: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_READ_BYTES", 2 * MAX_BYTES)
    monkeypatch.setattr(intake, "NUM_SMALL_SLOTS", 2)
    monkeypatch.setattr(intake, "GRACE_S", 0.05)
    with router(router_model_dir) as address, raw_http2.connect(address) as connection:
        for i in range(20):
            connection.sendall(raw_http2.call(2 * i + 1, method, b"x" * 1000, num_announced=MAX_BYTES))
        # All slots are taken now.
        time.sleep(0.03)
        with TandemClient(address) as client, grpc.insecure_channel(address) as channel:
            began = time.monotonic()
            assert client.server_info().model == "fake"
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert time.monotonic() - began < 5.0


@pytest.mark.slow
def test_watching_with_long_names_costs_strangers_more_than_the_router(router_model_dir: Path) -> None:
    with attacked_router(str(router_model_dir)) as attacked, open_channel(attacked) as channel:
        with attacked.bystander() as gap, attacked.watched() as growth:
            watch = channel.unary_stream(WATCH, response_deserializer=health_pb2.HealthCheckResponse.FromString)
            codes: Counter[str] = Counter()
            calls = []
            for i in range(100):
                request = health_pb2.HealthCheckRequest(service=str(i).ljust(MAX_BYTES - 100, "x"))
                calls.append(watch(request.SerializeToString(), timeout=TIMEOUT_S))
            for call in calls:
                codes[refusal(lambda call=call: next(call))[0].name] += 1
        assert codes == {"RESOURCE_EXHAUSTED": 100}
        # Without the limit: 3,695 MiB and 13 s.
        assert growth() < 600 * MIB
        assert gap() < 3.0


@pytest.mark.slow
@pytest.mark.parametrize(("key", "code", "limit"), [("wrong", "UNAUTHENTICATED", 100), (KEY, "INVALID_ARGUMENT", 900)])
def test_many_large_requests_take_little_at_a_time(router_model_dir: Path, key: str, code: str, limit: int) -> None:
    """Args: limit: MiB; without slots it took 1,162 and 1,985."""
    request = pb.GenerateRequest(text="a" * (MAX_BYTES - 100)).SerializeToString()

    async def send_all(address: str) -> Counter[str]:
        channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(8)]

        async def send(channel: grpc.aio.Channel) -> str:
            call = channel.unary_stream(GENERATE)(
                request, metadata=(("authorization", f"Bearer {key}"),), timeout=TIMEOUT_S
            )
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        codes = await asyncio.gather(*(send(channels[i % 8]) for i in range(200)))
        for channel in channels:
            await channel.close()
        return Counter(codes)

    # A model length that 8 MiB of text cannot fit.
    with attacked_router(str(router_model_dir)) as attacked:
        with attacked.bystander() as gap, attacked.watched() as growth:
            codes = asyncio.run(send_all(attacked.addresses.grpc))
        assert codes == {code: 200}
        assert growth() < limit * MIB
        # Large messages with a valid key are copied and checked, which takes a core's time.
        assert gap() < (3.0 if key == "wrong" else 10.0)


@pytest.mark.slow
@pytest.mark.parametrize(("num_connections", "num_streams"), [(512, 2048), (1, 512)])
def test_many_streams_are_all_served(router_model_dir: Path, num_connections: int, num_streams: int) -> None:
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=20, ignore_eos=True))
    metadata = (("authorization", f"Bearer {KEY}"),)

    async def scenario(address: str) -> int:
        channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(num_connections)]

        async def stream(channel: grpc.aio.Channel) -> int:
            generate = channel.unary_stream(
                GENERATE, pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
            )
            return sum([len(r.token_ids) async for r in generate(request, metadata=metadata, timeout=TIMEOUT_S)])

        num_tokens = await asyncio.gather(*(stream(channels[i % num_connections]) for i in range(num_streams)))
        for channel in channels:
            await channel.close()
        return sum(num_tokens)

    with attacked_router(str(router_model_dir), max_queued_requests=num_streams) as attacked:
        assert asyncio.run(scenario(attacked.addresses.grpc)) == 20 * num_streams


def open_channel(attacked: AttackedRouter) -> grpc.Channel:
    return grpc.insecure_channel(attacked.addresses.grpc, options=OPTIONS)

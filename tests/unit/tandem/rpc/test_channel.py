"""Limits of concurrent calls on one connection."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess
from tandem.rpc import channel
from tandem.rpc.channel import open_channel
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

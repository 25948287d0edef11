"""Memory that senders of endless headers take from a router, at its ports for clients and for processes."""

import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tandem.rpc import channel
from tests.fakes import raw_http2
from tests.fakes.attacked_router import GENERATE, attacked_router

MIB = 2**20
CHECK = "/grpc.health.v1.Health/Check"
NUM_CONNECTIONS = 8
BYTES_PER_CONNECTION = 128 * MIB
# A client cannot send faster than the router reads, which takes seconds on a busy machine.
TIMEOUT_S = 60.0


def send_headers_without_end(address: str) -> None:
    frames = raw_http2.frame(raw_http2.CONTINUATION, 0, 1, b"b" * 16000) * 4
    with raw_http2.connect(address) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.sendall(raw_http2.call_without_end_of_headers(1, GENERATE))
        for _ in range(BYTES_PER_CONNECTION // len(frames)):
            connection.sendall(frames)


@pytest.mark.parametrize("port", ["grpc", "cluster"])
def test_headers_without_end_take_little_memory(router_model_dir: Path, port: str) -> None:
    with attacked_router(str(router_model_dir)) as attacked:
        address = getattr(attacked.addresses, port)
        with attacked.watched() as growth:
            senders = [
                threading.Thread(target=send_headers_without_end, args=(address,)) for _ in range(NUM_CONNECTIONS)
            ]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join(TIMEOUT_S)
        assert not any(sender.is_alive() for sender in senders)
        # Without a bound on reading: 250 to 700 MiB.
        assert growth() < 16 * MIB


_ANSWERS = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_headers_beyond_the_limit_are_refused(router_model_dir: Path) -> None:
    with attacked_router(str(router_model_dir)) as attacked, grpc.insecure_channel(attacked.addresses.grpc) as client:
        check = client.unary_unary(CHECK, response_deserializer=health_pb2.HealthCheckResponse.FromString)

        def call(num_bytes: int) -> Any:
            return check(b"", metadata=(("x-long", "x" * num_bytes),), timeout=TIMEOUT_S)

        # Without a worker the router answers that it does not serve.
        assert call(channel.MAX_METADATA_BYTES // 2).status in _ANSWERS
        with pytest.raises(grpc.RpcError) as refused:
            call(channel.MAX_METADATA_BYTES)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call(0).status in _ANSWERS

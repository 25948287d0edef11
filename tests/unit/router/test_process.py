"""The router's process: what it cannot start with, and how it stops."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.config import RouterConfig
from router.policies.least_loaded import LeastLoaded
from router.process import RouterProcess, make_policy
from tests.fakes.routing import RecordingPolicy


def test_a_policy_is_made_from_its_name_or_its_path() -> None:
    assert type(make_policy("least_loaded")) is LeastLoaded
    assert type(make_policy("tests.fakes.routing:RecordingPolicy")) is RecordingPolicy


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.fakes.routing:Nobody", "module tests.fakes.routing has no Nobody"),
        ("no_such_package.policies:Mine", "cannot be imported"),
        ("tests.fakes.clock:FakeClock", "must be a class that derives from router.policies.base.RoutingPolicy"),
        ("router.policies.base:RoutingPolicy", "cannot be made: it does not define choose"),
        ("tests.fakes.routing:NeedsArguments", "cannot be made: .*missing 1 required positional argument: 'url'"),
    ],
)
def test_a_policy_that_cannot_be_made_is_an_error_at_the_start(router_model_dir: Path, path: str, message: str) -> None:
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, routing=path))
    try:
        with pytest.raises(ValueError, match=message):
            process.start()
    finally:
        process.stop()


def test_health_is_known_by_role(router_model_dir: Path) -> None:
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0))
    try:
        with grpc.insecure_channel(process.start().grpc) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "tandem.v1.Inference", "tandem.prefill", "tandem.decode", "tandem.both"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5.0)
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError):
                health.Check(health_pb2.HealthCheckRequest(service="tandem.other"), timeout=5.0)
    finally:
        process.stop()

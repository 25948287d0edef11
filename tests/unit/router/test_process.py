import json
import shutil
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.config import Role
from tandem.router.config import RouterConfig
from tandem.router.frontends.openai import listener
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.process import NUM_OTHER_FILES, RouterProcess, _within_open_files, make_policy
from tandem.rpc import channel
from tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.fakes import raw_http2
from tests.fakes.raw_http import error_of, read_all
from tests.fakes.routing import RecordingPolicy


def test_a_policy_is_made_from_its_name_or_its_path() -> None:
    assert type(make_policy("least_loaded")) is LeastLoaded
    assert type(make_policy("tests.fakes.routing:RecordingPolicy")) is RecordingPolicy


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.fakes.routing:Nobody", "module tests.fakes.routing has no Nobody"),
        ("no_such_package.policies:Mine", "cannot be imported"),
        ("tests.fakes.clock:FakeClock", "must be a class that derives from tandem.router.policies.base.RoutingPolicy"),
        ("tandem.router.policies.base:RoutingPolicy", "cannot be made: it does not define choose"),
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


@pytest.mark.parametrize("generation_config", ["auto", "none"])
def test_what_the_model_says_of_sampling_is_read_where_it_counts(
    router_model_dir: Path, tmp_path: Path, generation_config: str
) -> None:
    shutil.copytree(router_model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    process = RouterProcess(
        RouterConfig(str(tmp_path), "fake", 64, grpc_port=0, http_port=0, generation_config=generation_config)
    )
    try:
        if generation_config == "none":
            assert process.start().http
        else:
            with pytest.raises(ValueError, match="temperature must be a number of at least 0, not -1"):
                process.start()
    finally:
        process.stop()


def test_a_call_s_id_comes_back_in_its_metadata(router_model_dir: Path) -> None:
    config = RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, worker_wait_timeout_s=0)
    process = RouterProcess(config)
    try:
        with grpc.insecure_channel(process.start().grpc) as connection:
            stub = inference_pb2_grpc.InferenceStub(connection)
            request = inference_pb2.GenerateRequest(text="a")
            call = stub.Generate(request, metadata=(("x-request-id", "mine"),), timeout=5.0)
            with pytest.raises(grpc.RpcError) as refused:
                list(call)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(call.trailing_metadata()) == {"tandem-router": "router-0", "x-request-id": "mine"}
    finally:
        process.stop()


def test_health_is_known_by_role(router_model_dir: Path) -> None:
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0))
    try:
        with grpc.insecure_channel(process.start().grpc) as connection:
            health = health_pb2_grpc.HealthStub(connection)
            for name in ("", "tandem.v1.Inference", "tandem.prefill", "tandem.decode", "tandem.both"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5.0)
                assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError):
                health.Check(health_pb2.HealthCheckRequest(service="tandem.other"), timeout=5.0)
    finally:
        process.stop()


def test_each_port_has_so_many_connections_and_no_more(router_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MIN_IDLE_S", 1000.0)
    config = RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, max_connections=3)
    process = RouterProcess(config)
    try:
        addresses = process.start()
        host, _, port = addresses.http.rpartition(":")
        http = [socket.create_connection((host, int(port)), timeout=10.0) for _ in range(3)]
        with socket.create_connection((host, int(port)), timeout=10.0) as late:
            assert error_of(read_all(late)) == (503, "3 connections are open already; try again later")
        http.pop().close()
        assert answers(addresses.http)

        grpc_connections = [raw_http2.connect(addresses.grpc) for _ in range(3)]
        for connection in grpc_connections:
            raw_http2.frames_until(connection, raw_http2.SETTINGS)
        with raw_http2.connect(addresses.grpc) as late, pytest.raises((AssertionError, ConnectionError)):
            raw_http2.frames_until(late, raw_http2.SETTINGS)
        grpc_connections.pop().close()
        with grpc.insecure_channel(addresses.grpc) as ready:
            grpc.channel_ready_future(ready).result(10.0)
        for connection in (*http, *grpc_connections):
            connection.close()
    finally:
        process.stop()


@pytest.mark.parametrize(("num_files", "shared_port", "expected"), [(2**20, 0, 4096), (1024, 0, 256), (1024, 7, 128)])
def test_connections_leave_files_for_the_workers(
    num_files: int,
    shared_port: int,
    expected: int,
    router_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tandem.router.process.raise_open_files_limit", lambda: num_files)
    config = RouterConfig(
        str(router_model_dir),
        "fake",
        64,
        grpc_port=0,
        http_port=0,
        shared_grpc_port=shared_port,
        shared_http_port=shared_port,
    )
    process = RouterProcess(config)
    try:
        with urllib.request.urlopen(f"http://{process.start().http}/server_info", timeout=10.0) as answer:
            assert json.load(answer)["config"]["max_connections"] == expected
    finally:
        process.stop()
    assert ("each port takes" in caplog.text) == (expected < 4096)


def test_a_router_with_too_few_files_does_not_start(router_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.process.raise_open_files_limit", lambda: 513)
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0))
    try:
        with pytest.raises(ValueError, match="the system allows 513 open files"):
            process.start()
    finally:
        process.stop()


def answers(address: str) -> bool:
    """True if a request gets an answer within a second, over any number of connections."""
    host, _, port = address.rpartition(":")
    for _ in range(100):
        with socket.create_connection((host, int(port)), timeout=10.0) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            if read_all(connection).startswith(b"HTTP/1.1 200 "):
                return True
        time.sleep(0.01)
    return False


def test_a_connection_that_never_speaks_grpc_is_closed(router_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_MS", 300)
    monkeypatch.setattr(channel, "MAX_IDLE_MS", 500)
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0))
    try:
        address = process.start().grpc
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10.0) as silent:
            read_all(silent)
        with raw_http2.connect(address) as idle:
            read_all(idle)
    finally:
        process.stop()


def test_a_variable_that_opentelemetry_refuses_keeps_no_router_from_starting(
    router_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: str) -> None:
        raise ValueError("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a number")

    # The library reads some variables once, at its import.
    monkeypatch.setattr("tandem.router.observe.otlp.OtlpExporter", refuse)
    endpoint = "http://127.0.0.1:9/v1/traces"
    process = RouterProcess(
        RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, otlp_endpoint=endpoint)
    )
    try:
        assert process.start().grpc
    finally:
        process.stop()
    assert "no spans of requests are sent: OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT" in caplog.text


def test_a_collector_of_traces_that_is_away_keeps_no_router_from_starting_and_stopping(router_model_dir: Path) -> None:
    endpoint = "http://127.0.0.1:9/v1/traces"
    process = RouterProcess(
        RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, otlp_endpoint=endpoint)
    )
    try:
        with grpc.insecure_channel(process.start().grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=5.0).model == "fake"
    finally:
        before = time.monotonic()
        process.stop()
    assert time.monotonic() - before < 8.0


def test_no_secret_is_logged_or_told(router_model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    secrets: dict[str, Any] = {"cluster_token": "token-of-this-cluster", "namespace_secret": "secret-of-the-namespaces"}
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, **secrets))
    told = []
    with caplog.at_level("DEBUG"):
        try:
            address = process.start().http
            for path in ("server_info", "metrics", "sd", "version", "load"):
                told.append(urllib.request.urlopen(f"http://{address}/{path}", timeout=10.0).read().decode())
        finally:
            process.stop()
    assert all(told)
    for secret in secrets.values():
        assert not any(secret in text for text in (*told, caplog.text, repr(process), repr(vars(process))))


def test_streams_of_many_workers_are_no_client_s_files() -> None:
    workers: dict[str, Role] = {f"both-{number}": "both" for number in range(1000)}
    config = RouterConfig("nowhere", "fake", 64, max_connections=10_000, workers=workers)
    assert _within_open_files(config, NUM_OTHER_FILES + 1000 + 64).max_connections == 32
    assert _within_open_files(config, NUM_OTHER_FILES + 1000 + 20_000) is config
    with pytest.raises(ValueError, match=f"needs more than {NUM_OTHER_FILES + 1000 + 2}"):
        _within_open_files(config, 1024)

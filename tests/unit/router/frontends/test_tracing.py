"""Recordings for clients, with a real router without workers."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.client import TandemClient, TandemError
from tandem.deploy.cli.main import main
from tandem.recording import Recorder, Recording
from tandem.router.config import RouterConfig
from tandem.router.frontends import tracing
from tandem.router.process import RouterProcess

TWO_KEYS = ("first-key", "second-key")


@contextlib.contextmanager
def router(model_dir: Path, **config: Any) -> Iterator[str]:
    process = RouterProcess(RouterConfig(str(model_dir), "fake", 64, grpc_port=0, http_port=0, **config))
    try:
        yield process.start().grpc
    finally:
        process.stop()


def test_a_router_records_itself_and_lets_go_of_a_client_that_leaves(router_model_dir: Path) -> None:
    with router(router_model_dir) as address, TandemClient(address) as client:
        parts = client.record(30.0)
        assert next(parts).process == "router-0"
        with pytest.raises(TandemError, match="another recording is being made; try again when it has ended"):
            next(client.record(1.0))
        parts.close()
        deadline = time.monotonic() + 10.0
        while True:
            # The router notices a moment later that the first client has gone.
            with contextlib.suppress(TandemError):
                assert {part.process for part in client.record(0.05)} == {"router-0"}
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(TandemError, match="a recording lasts more than 0 and at most 60 seconds"):
            next(client.record(60.5))


def test_who_does_not_read_a_recording_keeps_others_from_theirs_for_a_while_alone(
    router_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "TIMEOUT_S", 1.0)
    # More than a connection buffers.
    monkeypatch.setattr(Recorder, "stop", lambda _: Recording(deque([("t", "x" * 1000, 1, 2)] * 20_000), 0))
    with router(router_model_dir) as address, TandemClient(address) as client:
        unread = client.record(0.05)
        assert next(unread).process == "router-0"
        deadline = time.monotonic() + 10.0
        while True:
            with contextlib.suppress(TandemError):
                assert next(client.record(0.05)).process == "router-0"
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(TandemError, match="the recording was not read"):
            list(unread)


@pytest.mark.parametrize(
    ("config", "key", "code"),
    [
        ({"api_keys": TWO_KEYS}, "first-key", "PERMISSION_DENIED"),
        ({"api_keys": TWO_KEYS, "allow_tracing": True}, "first-key", ""),
        ({"api_keys": TWO_KEYS, "allow_tracing": True}, "wrong-key", "UNAUTHENTICATED"),
        ({"api_keys": TWO_KEYS[:1]}, "first-key", ""),
        ({"api_keys": TWO_KEYS[:1]}, "", "UNAUTHENTICATED"),
    ],
)
def test_nobody_sees_the_requests_of_other_keys_unasked(
    router_model_dir: Path, config: dict[str, Any], key: str, code: str
) -> None:
    with router(router_model_dir, **config) as address, TandemClient(address, key) as client:
        if not code:
            assert next(client.record(0.05)).process == "router-0"
            return
        with pytest.raises(TandemError) as refusal:
            next(client.record(0.05))
        assert refusal.value.code == code


def test_a_request_that_cannot_be_parsed_is_refused(router_model_dir: Path) -> None:
    with router(router_model_dir) as address, grpc.insecure_channel(address) as channel:
        record = channel.unary_stream("/tandem.v1.Tracing/Record")
        with pytest.raises(grpc.RpcError) as refusal:
            list(record(b"\xff\xff", timeout=10.0))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_command_says_what_is_wrong_and_leaves_the_older_file(
    router_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    out.write_text("an older one")
    with router(router_model_dir, api_keys=TWO_KEYS) as address:
        trace = ["trace", "--seconds", "0.05", "--address", address, "--out"]
        assert main([*trace, str(out), "--api-key", "first-key"]) == 1
        assert "--allow-tracing" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
        assert out.read_text() == "an older one"
        assert main([*trace, str(tmp_path / "nowhere" / "trace.json"), "--api-key", "first-key"]) == 1
        assert "No such file or directory" in capsys.readouterr().err
    # A path that is no file is not replaced.
    assert main(["trace", "--address", "127.0.0.1:1", "--out", str(tmp_path)]) == 1
    assert "is no file" in capsys.readouterr().err
    for seconds in ("0", "61", "-1", "nan", "many"):
        with pytest.raises(SystemExit):
            main(["trace", "--seconds", seconds])

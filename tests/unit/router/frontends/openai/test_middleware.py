"""Size and pace of HTTP bodies."""

import gzip
import json
import socket
import time
from pathlib import Path

import pytest

from tandem.router.config import RouterConfig
from tandem.router.frontends.openai import middleware
from tandem.router.process import RouterProcess
from tests.cluster.bad_input import SHOWN_APART
from tests.fakes.raw_http import HEAD, error_of, read_all, read_one

WAIT_S = 0.3


def test_a_body_that_stops_coming(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    row = SHOWN_APART["body that stops coming"]
    assert row.message == f"no part of the body came for {middleware.BODY_TIMEOUT_S:g} s"
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", WAIT_S)
    for framing in (b"content-length: 100", b"transfer-encoding: chunked"):
        with socket.create_connection(address, timeout=10.0) as connection:
            connection.sendall(HEAD + framing + b"\r\n\r\n")
            assert error_of(read_all(connection)) == (row.status, f"no part of the body came for {WAIT_S:g} s")


def test_bodies_count_from_when_they_are_read_until_the_answer(router_model_dir: Path) -> None:
    limits = {"max_body_bytes": 1000, "max_bytes_in_hand": 2000}
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, **limits))  # type: ignore[arg-type]
    try:
        host, _, port = process.start().http.rpartition(":")
        held = []
        for framing in (b"content-length: 1000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n3e7\r\n"):
            held.append(socket.create_connection((host, int(port)), timeout=10.0))
            held[-1].sendall(HEAD + framing + b" " * 999)
        # Received bytes count, not announced ones.
        held.append(socket.create_connection((host, int(port)), timeout=10.0))
        held[-1].sendall(HEAD + b"content-length: 1000\r\n\r\n  ")
        held[-1].settimeout(0.3)
        with pytest.raises(TimeoutError):
            held[-1].recv(65536)
        with socket.create_connection((host, int(port)), timeout=10.0) as other:
            other.sendall(HEAD + b"content-length: 1000\r\n\r\n" + b" " * 1000)
            response = read_all(other)
        assert error_of(response)[0] == 429
        error = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert "fill the memory set aside" in error["message"]
        for connection in held:
            connection.close()
        # The server notices at its next look.
        deadline = time.monotonic() + 10.0
        while error_of(response)[0] == 429 and time.monotonic() < deadline:
            with socket.create_connection((host, int(port)), timeout=10.0) as other:
                other.sendall(HEAD + b"connection: close\r\ncontent-length: 1000\r\n\r\n" + b" " * 1000)
                response = read_all(other)
        assert error_of(response)[0] == 400
    finally:
        process.stop()


def test_an_encoded_body_is_refused_by_its_encoding(address: tuple[str, int]) -> None:
    row = SHOWN_APART["body in gzip"]
    body = gzip.compress(b'{"prompt": 1}')
    request = HEAD + b"content-encoding: %s\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(request % (b"gzip", len(body)) + body)
        assert error_of(read_all(connection)) == (row.status, row.message)
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(request % (b"identity", 2) + b"{}")
        assert error_of(read_one(connection))[0] == 400

"""Limits on request heads."""

import socket
import time

import pytest

from tandem.router.frontends.openai import http_connection
from tests.fakes.raw_http import HEAD, error_of, read_all

WAIT_S = 0.3


@pytest.mark.parametrize("part", [b"", b"GET /he", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_a_request_that_does_not_come(address: tuple[str, int], part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", WAIT_S)
    began = time.monotonic()
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(part)
        assert read_all(connection) == b""
    # uvloop counts whole milliseconds from the start of its turn, so timers may fire a little early.
    assert time.monotonic() - began >= WAIT_S - 0.01


def test_a_body_may_take_longer_than_a_head(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", WAIT_S)
    with socket.create_connection(address, timeout=10.0) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"content-length: 2\r\n\r\n{")
            time.sleep(1.5 * WAIT_S)
            connection.sendall(b"}")
            response = connection.recv(65536)
            assert error_of(response) == (400, "prompt: Field required")


def test_heads_that_come_after_long_bodies_count_from_their_own_beginning(address: tuple[str, int]) -> None:
    body = b" " * (2 * http_connection.MAX_HEAD_BYTES)
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(address, timeout=10.0) as connection:
        for _ in range(3):
            connection.sendall(request)
            assert error_of(connection.recv(65536))[0] == 400

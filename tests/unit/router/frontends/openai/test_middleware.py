"""What an HTTP client may send, and how fast."""

import socket

import pytest

from router.frontends.openai import middleware
from tests.cluster.bad_input import SHOWN_APART
from tests.fakes.raw_http import HEAD, error_of, read_all

WAIT_S = 0.3


def test_a_body_that_stops_coming(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    row = SHOWN_APART["body that stops coming"]
    assert row.message == f"no part of the body came for {middleware.BODY_TIMEOUT_S:g} s"
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", WAIT_S)
    for framing in (b"content-length: 100", b"transfer-encoding: chunked"):
        with socket.create_connection(address, timeout=10.0) as connection:
            connection.sendall(HEAD + framing + b"\r\n\r\n")
            assert error_of(read_all(connection)) == (row.status, f"no part of the body came for {WAIT_S:g} s")

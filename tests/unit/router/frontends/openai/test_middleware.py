"""What an HTTP client may send, how fast, and that a body full of errors costs no more than its first one."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from router.config import RouterConfig
from router.frontends.openai import middleware, protocol
from router.frontends.openai.schema import ChatCompletionRequest, CompletionRequest
from router.process import RouterProcess
from tests.cluster.bad_input import SHOWN_APART

WAIT_S = 0.3
NUM_ITEMS = 20_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def address(router_model_dir: Path) -> Iterator[tuple[str, int]]:
    """The HTTP port of a router without workers."""
    process = RouterProcess(RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0))
    try:
        host, _, port = process.start().http.rpartition(":")
        yield host, int(port)
    finally:
        process.stop()


def all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def error_of(response: bytes) -> tuple[int, str]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_a_body_that_stops_coming(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    row = SHOWN_APART["body that stops coming"]
    assert row.message == f"no part of the body came for {middleware.BODY_TIMEOUT_S:g} s"
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", WAIT_S)
    for framing in (b"content-length: 100", b"transfer-encoding: chunked"):
        with socket.create_connection(address, timeout=10.0) as connection:
            connection.sendall(HEAD + framing + b"\r\n\r\n")
            assert error_of(all_of(connection)) == (row.status, f"no part of the body came for {WAIT_S:g} s")


@pytest.mark.parametrize("part", [b"", b"GET /he", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_a_request_that_does_not_come(address: tuple[str, int], part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", WAIT_S)
    began = time.monotonic()
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(part)
        assert all_of(connection) == b""
    # uvloop counts whole milliseconds, from the beginning of its turn: its timers may come a little early.
    assert time.monotonic() - began >= WAIT_S - 0.01


def test_a_body_may_take_longer_than_a_head(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", WAIT_S)
    with socket.create_connection(address, timeout=10.0) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"content-length: 2\r\n\r\n{")
            time.sleep(1.5 * WAIT_S)
            connection.sendall(b"}")
            response = connection.recv(65536)
            assert error_of(response) == (400, "prompt: Field required")


def test_heads_that_come_after_long_bodies_count_from_their_own_beginning(address: tuple[str, int]) -> None:
    body = b" " * (2 * protocol.MAX_HEAD_BYTES)
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(address, timeout=10.0) as connection:
        for _ in range(3):
            connection.sendall(request)
            assert error_of(connection.recv(65536))[0] == 400


def test_the_description_names_the_answers_that_there_are(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        description = json.loads(all_of(connection).partition(b"\r\n\r\n")[2])
    for operations in description["paths"].values():
        for operation in operations.values():
            assert {"200", "400", "401", "413", "503"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in description["components"]["schemas"]


MANY: list[Any] = [{}] * NUM_ITEMS
MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": MANY},
        {"prompt": [[], *MANY]},
        {"prompt": ["", *MANY]},
        {"prompt": [["x"] * NUM_ITEMS] * 3},
        {"prompt": [[1]] * NUM_ITEMS},
        {"prompt": "hi", "stop": MANY},
        {"prompt": "hi", "stop_token_ids": MANY},
        {"prompt": "hi", "logit_bias": {f"x{i}": {} for i in range(NUM_ITEMS)}},
        {"prompt": "hi", **{f"x{i}": 1 for i in range(NUM_ITEMS)}},
        {"messages": MANY},
        {"messages": [MESSAGE, {f"x{i}": 1 for i in range(NUM_ITEMS)}]},
        {"messages": [MESSAGE, {"role": "user", "content": MANY}]},
        {"messages": [MESSAGE], "modalities": MANY},
        {"messages": [MESSAGE], "tools": MANY},
        {"messages": [MESSAGE], "functions": MANY},
    ],
    ids=lambda fields: "-".join(list(fields)[:3]),
)
def test_the_first_error_in_a_list_is_the_last(fields: dict[str, Any]) -> None:
    # Each costs a kilobyte and some microseconds, and a body has room for millions.
    kind = ChatCompletionRequest if "messages" in fields else CompletionRequest
    with pytest.raises(ValidationError) as invalid:
        kind.model_validate(fields)
    assert invalid.value.error_count() <= 2

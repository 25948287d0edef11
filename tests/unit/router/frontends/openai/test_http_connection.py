"""Limits on the bytes, pieces and time of requests, and the framing of answers."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.router.config import RouterConfig
from tandem.router.frontends.openai import closing_transport, http_connection
from tandem.router.process import RouterProcess
from tests.cluster.bad_input import SHOWN_APART
from tests.fakes.raw_http import HEAD, error_of, read_all, read_one

WAIT_S = 0.3
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
BODY = b'{"prompt": 1}'
KEY = "secret"


@pytest.fixture(scope="module")
def keyed(router_model_dir: Path) -> Iterator[tuple[str, int]]:
    process = RouterProcess(
        RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, api_keys=(KEY,), max_body_bytes=2**20)
    )
    try:
        host, _, port = process.start().http.rpartition(":")
        yield host, int(port)
    finally:
        process.stop()


def ask(address: tuple[str, int], request: bytes) -> tuple[int, str]:
    """Returns status and message of the refusal that ends the connection."""
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(request)
        return error_of(read_all(connection))


@pytest.mark.parametrize("pause", [0, 10, 37, 40])
def test_answers_in_parts_are_read_whole(pause: int) -> None:
    """A busy server's head and body come apart."""
    answer = b'HTTP/1.1 400 \r\nContent-Length: 31\r\n\r\n{"error": {"message": "wrong"}}'
    server, client = socket.socketpair()
    with server, client, ThreadPoolExecutor(1) as reader:
        client.settimeout(10.0)
        reading = reader.submit(read_one, client)
        server.sendall(answer[:pause])
        time.sleep(0.05)
        server.sendall(answer[pause:])
        assert error_of(reading.result()) == (400, "wrong")


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
            response = read_one(connection)
            assert error_of(response) == (400, "prompt: Field required")


def test_heads_that_come_after_long_bodies_count_from_their_own_beginning(address: tuple[str, int]) -> None:
    body = b" " * (2 * http_connection.MAX_HEAD_BYTES)
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(address, timeout=10.0) as connection:
        for _ in range(3):
            connection.sendall(request)
            assert error_of(read_one(connection))[0] == 400


def expected(name: str) -> tuple[int, str]:
    row = SHOWN_APART[name]
    return row.status, row.message


@pytest.mark.parametrize("trailers", [b"a: b\r\n\r\n", b"a:b\r\n" * 50_000])
def test_trailers_are_refused(address: tuple[str, int], trailers: bytes) -> None:
    assert ask(address, CHUNKED + b"2\r\n{}\r\n0\r\n" + trailers) == expected("trailers")


@pytest.mark.parametrize("begin", [b"0\r\na: ", b"0\r\n", b"1;a="])
def test_bytes_beside_a_body_have_a_limit(address: tuple[str, int], begin: bytes) -> None:
    """A trailer's name or value that never ends, and a chunk's extension."""
    assert ask(address, CHUNKED + begin + b"x" * 2**20) == expected("endless trailer, or chunk extension")


def test_a_body_comes_in_pieces_of_some_size(address: tuple[str, int]) -> None:
    body = BODY.ljust(4096)
    for size in (1, 2, 64):
        chunks = b"".join(b"%x\r\n%s\r\n" % (size, body[start : start + size]) for start in range(0, len(body), size))
        answer = ask(address, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        if size < 64:
            assert answer == expected("body in tiny chunks")
        else:
            assert answer[0] == 400 and answer[1].startswith("prompt"), "it is read"


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("more than 128 headers", b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * 50_000),
        ("head of more than 64 KiB", b"GET /health HTTP/1.1\r\na: " + b"x" * 2**17),
        ("head of more than 64 KiB", b"GET /health HTTP/1.1\r\na: %s\r\n\r\n" % (b"x" * 2**17)),
        ("head of more than 64 KiB", b"\r\n" * 2**17),
        ("URL of more than 8 KiB", b"GET /" + b"%41" * 4096),
        ("tunnel through the server", b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("bytes that are no HTTP", b"\x16\x03\x01\x02\x00\x01"),
    ],
)
def test_heads_have_limits(address: tuple[str, int], name: str, head: bytes) -> None:
    assert ask(address, head) == expected(name)


def test_a_refusal_comes_before_the_body(keyed: tuple[str, int]) -> None:
    head = HEAD + b"authorization: Bearer wrong\r\nexpect: 100-continue\r\n"
    for framing in (b"content-length: 1000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"):
        with socket.create_connection(keyed, timeout=10.0) as connection:
            connection.sendall(head + framing)
            assert error_of(read_one(connection)) == (401, "the API key is wrong")


def test_a_client_that_sends_on_reads_its_refusal(keyed: tuple[str, int]) -> None:
    """More than the buffers of both ends hold, so that a closed connection would break the sending."""
    num_bytes = 24 * 2**20
    for key, expected in (("wrong", 401), (KEY, 413)):
        with socket.create_connection(keyed, timeout=20.0) as connection:
            connection.sendall(HEAD + b"authorization: Bearer %s\r\n" % key.encode())
            connection.sendall(b"content-length: %d\r\n\r\n" % num_bytes)
            for _ in range(num_bytes // 2**20):
                connection.sendall(bytes(2**20))
            assert error_of(read_all(connection))[0] == expected


def test_a_refused_client_that_sends_nothing_is_closed(keyed: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing_transport, "LINGER_S", WAIT_S)
    with socket.create_connection(keyed, timeout=10.0) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n")
        assert error_of(read_all(connection))[0] == 401
        with pytest.raises(ConnectionError):
            for _ in range(200):
                connection.sendall(b" ")
                time.sleep(0.05)


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.2"])
@pytest.mark.parametrize("framing", ["content-length", "chunked", "in two parts"])
def test_an_upgrade_is_ignored(address: tuple[str, int], upgrade: bytes, framing: str) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %s\r\nhttp2-settings: AAMAAABk\r\n" % upgrade
    if framing == "chunked":
        request = HEAD + offer + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    else:
        request = HEAD + offer + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
    with socket.create_connection(address, timeout=10.0) as connection:
        for _ in range(2):
            if framing == "in two parts":
                connection.sendall(request[:-5])
                time.sleep(0.05)
                connection.sendall(request[-5:])
            else:
                connection.sendall(request)
            status, message = error_of(read_one(connection))
            assert (status, message.partition(":")[0]) == (400, "prompt"), "the body was read"
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\n")
            assert read_one(connection).startswith(b"HTTP/1.1 200 ")


def test_curl_offers_http_2_and_is_served(address: tuple[str, int]) -> None:
    url = f"http://{address[0]}:{address[1]}"
    command = ["curl", "--silent", "--show-error", "--max-time", "20", "--http2", "--write-out", " %{http_code}"]
    listed = subprocess.run([*command, f"{url}/v1/models"], capture_output=True, text=True, check=True)
    assert listed.stdout.endswith(" 200")
    posted = subprocess.run(
        [*command, "--json", BODY.decode(), f"{url}/v1/completions"], capture_output=True, text=True, check=True
    )
    content, _, status = posted.stdout.rpartition(" ")
    assert (status, json.loads(content)["error"]["param"]) == ("400", "prompt")


def test_a_second_request_before_the_answer_ends_the_connection(address: tuple[str, int]) -> None:
    request = HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(request + request)
        assert read_all(connection) == b""
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(request)
        assert error_of(read_one(connection))[0] == 400


def test_an_answer_of_unknown_length_ends_with_the_connection_in_http_1_0(keyed: tuple[str, int]) -> None:
    """The live page's stream is the only one that needs no worker."""
    head = b"GET /live HTTP/1.%d\r\nhost: x\r\nauthorization: Bearer secret\r\n\r\n"
    for minor in (0, 1):
        with socket.create_connection(keyed, timeout=10.0) as connection:
            connection.sendall(head % minor)
            received = b""
            while b"data: {" not in received:
                received += connection.recv(65536)
        fields, _, body = received.partition(b"\r\n\r\n")
        lines = fields.lower().split(b"\r\n")
        assert (b"transfer-encoding: chunked" in lines) == (minor == 1)
        assert (b"connection: close" in lines) == (minor == 0)
        assert body.startswith(b"data: {") == (minor == 0), "a chunk begins with its size"
        assert b"x-accel-buffering: no" in lines
        assert b"cache-control: no-cache, no-transform" in lines


def test_an_answer_in_http_1_0_may_have_a_length(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10.0) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head and body == b'{"status":"ok"}'

"""Headers around all HTTP answers, on the sockets of a router without workers."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess
from tests.fakes.raw_http import read_all

ORIGIN = "https://pages.example"
KEY = {"authorization": "Bearer secret"}


class Server:
    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> http.client.HTTPResponse:
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10.0)
        connection.request(
            method, path, body or None, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        self.body = response.read()
        connection.close()
        return response


def serve(model_dir: Path, **options: object) -> Iterator[Server]:
    process = RouterProcess(
        RouterConfig(str(model_dir), "fake", 64, grpc_port=0, http_port=0, worker_wait_timeout_s=0, **options)  # type: ignore[arg-type]
    )
    try:
        yield Server(process.start().http)
    finally:
        process.stop()


@pytest.fixture(scope="module")
def server(router_model_dir: Path) -> Iterator[Server]:
    """A router with a key, behind a proxy, for pages of one origin."""
    yield from serve(router_model_dir, allowed_origins=(ORIGIN,), root_path="/tandem", api_keys=("secret",))


@pytest.fixture(scope="module")
def plain(router_model_dir: Path) -> Iterator[Server]:
    yield from serve(router_model_dir)


def test_every_answer_has_the_id_of_its_request(plain: Server) -> None:
    assert re.fullmatch("[0-9a-f]{32}", plain.ask("GET", "/health").headers["x-request-id"])
    for method, path, body in (("GET", "/health", ""), ("GET", "/nowhere", ""), ("POST", "/v1/completions", "{")):
        assert plain.ask(method, path, body, x_request_id="my/id:1").headers["x-request-id"] == "my/id:1"


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "caf\xe9", "tab\there"])
def test_an_id_that_cannot_be_taken_is_replaced(plain: Server, given: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", plain.ask("GET", "/health", x_request_id=given).headers["x-request-id"])


def test_a_client_is_told_when_to_come_again(plain: Server) -> None:
    response = plain.ask("POST", "/v1/completions", '{"prompt": "a"}', content_type="application/json")
    assert (response.status, response.headers["retry-after"]) == (503, "2")
    assert "retry-after" not in plain.ask("GET", "/nowhere").headers


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/sd", "/v1/models", "/v1/models/fake"])
def test_head_is_get_without_the_body(plain: Server, path: str) -> None:
    whole = plain.ask("GET", path)
    assert plain.body
    alone = plain.ask("HEAD", path)
    assert (alone.status, plain.body) == (whole.status, b"")
    assert alone.headers["content-type"] == whole.headers["content-type"]
    if path != "/metrics":
        assert alone.headers["content-length"] == whole.headers["content-length"]
    assert plain.ask("HEAD", "/v1/completions").status == 405


def test_a_connection_is_whole_after_a_head(plain: Server) -> None:
    host, _, port = plain.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert read_all(connection).endswith(b'{"status":"ok"}')


def test_a_browser_asks_first_and_has_no_key_yet(server: Server) -> None:
    headers = {"origin": ORIGIN, "access_control_request_method": "POST"}
    response = server.ask(
        "OPTIONS", "/v1/chat/completions", access_control_request_headers="authorization,content-type", **headers
    )
    assert response.status == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]
    other = server.ask("OPTIONS", "/v1/models", **{**headers, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_pages_can_read_answers_and_errors_of_their_origin_alone(server: Server) -> None:
    for path, status in (("/v1/models", 200), ("/v1/models/other", 404), ("/v1/nowhere", 404)):
        response = server.ask("GET", path, origin=ORIGIN, **KEY)
        assert (response.status, response.headers["access-control-allow-origin"]) == (status, ORIGIN)
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]
    refused = server.ask("GET", "/v1/models", origin=ORIGIN)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    bad = server.ask("POST", "/v1/completions", "{", origin=ORIGIN, content_type="application/json", **KEY)
    assert (bad.status, bad.headers["access-control-allow-origin"]) == (400, ORIGIN)
    other = server.ask("GET", "/v1/models", origin="https://other.example", **KEY)
    assert "access-control-allow-origin" not in other.headers


def test_a_preflight_with_a_body_is_the_last_of_its_connection(server: Server) -> None:
    headers = {"origin": ORIGIN, "access_control_request_method": "POST"}
    assert server.ask("OPTIONS", "/v1/models", "x" * 100, **headers).headers["connection"] == "close"


def test_without_the_option_nothing_is_said_to_browsers(plain: Server) -> None:
    headers = {"origin": ORIGIN, "access_control_request_method": "POST"}
    assert plain.ask("OPTIONS", "/v1/models", **headers).status == 405
    response = plain.ask("GET", "/v1/models", origin=ORIGIN)
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_behind_a_proxy_the_description_has_its_prefix(server: Server) -> None:
    server.ask("GET", "/openapi.json", **KEY)
    assert json.loads(server.body)["servers"] == [{"url": "/tandem"}]
    # With and without a proxy that strips the prefix.
    for path in ("/v1/models", "/tandem/v1/models"):
        assert server.ask("GET", path, **KEY).status == 200
    server.ask("GET", "/sd", **KEY)
    assert {target["labels"]["__metrics_path__"] for target in json.loads(server.body)} == {"/tandem/metrics"}

"""A cluster behind nginx and behind the LiteLLM proxy: tokens come when they are sampled, and a client that leaves ends
its request at the cluster."""

import http.client
import json
import math
import os
import re
import shutil
import signal
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tandem.client import TandemClient
from tests.clients import environments, proxies
from tests.clients.conftest import MODEL, STOP_S
from tests.clients.page import Row
from tests.clients.table import LITELLM_PROXY, PROGRAMS
from tests.cluster.command import Server, start
from tests.cluster.conftest import wait_until

pytestmark = [pytest.mark.clients, pytest.mark.timeout(environments.INSTALL_TIMEOUT_S + 600)]

# Debian has it in a folder that is not on every user's path.
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Far longer than any test, unless its client leaves.
LONG = {"max_tokens": 1800, "min_tokens": 1800}
WAIT_S = 60.0


class Served:
    """A cluster of one prefill and one decode worker."""

    def __init__(self, server: Server) -> None:
        found = re.search(r"over HTTP at http://(\S+)", "".join(server.output))
        assert found is not None
        self.http_address = found[1]
        self.grpc_address = server.address

    def outcomes(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self.http_address}/metrics", timeout=30.0) as answer:
            text = answer.read().decode()
        found = re.findall(r'^tandem_requests_total\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
        return {outcome: float(count) for outcome, count in found}

    @contextmanager
    def decode_worker_stopped(self) -> Iterator[None]:
        """The first token comes from the prefill worker, and no other comes."""
        with TandemClient(self.grpc_address) as client:
            [pid] = [worker.pid for worker in client.server_info().workers if worker.role == "decode"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def wait_ready(self) -> None:
        with TandemClient(self.grpc_address) as client:
            wait_until(lambda: client.server_info().ready, WAIT_S, "the cluster is ready")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = start("--model", MODEL, "--prefill", "1", "--decode", "1", runtime_dir=tmp_path_factory.mktemp("runtime"))
    try:
        yield Served(server)
    finally:
        server.process.terminate()
        server.process.wait(STOP_S)
        server.finish()


@pytest.fixture(scope="module", params=["nginx-stock", "nginx-documented", LITELLM_PROXY.name])
def address(
    request: pytest.FixtureRequest, served: Served, passed: dict[str, Row], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    name = request.param
    directory = tmp_path_factory.mktemp("proxy")
    with ExitStack() as running:
        if name == LITELLM_PROXY.name:
            python = environments.python(LITELLM_PROXY)
            passed[name] = Row(name, environments.version(LITELLM_PROXY), LITELLM_PROXY.settings, ())
            yield running.enter_context(proxies.litellm(python, MODEL, served.http_address, directory))
            return
        if NGINX is None:
            pytest.skip("NOT TESTED: nginx is missing; apt-get install --no-install-recommends nginx-light")
        servers = proxies.STOCK if name == "nginx-stock" else proxies.documented()
        passed[name] = Row(name, proxies.nginx_version(NGINX), PROGRAMS[name], ())
        yield running.enter_context(proxies.nginx(NGINX, servers, served.http_address, directory))


@pytest.fixture
def tried(request: pytest.FixtureRequest, address: str, passed: dict[str, Row]) -> Callable[[], None]:
    """Returns a function for a test's end: it adds the test to the proxy's row."""
    name = request.node.callspec.params["address"]
    check = request.node.originalname.removeprefix("test_").replace("_", " ")

    def add() -> None:
        passed[name] = replace(passed[name], passed=(*passed[name].passed, check))

    return add


@contextmanager
def asked(address: str, path: str, **body: Any) -> Iterator[http.client.HTTPConnection]:
    """Send a request as a browser does, which takes gzip, and leave at the end."""
    with closing(http.client.HTTPConnection(address, timeout=WAIT_S)) as connection:
        headers = {"content-type": "application/json", "accept-encoding": "gzip"}
        headers["authorization"] = f"Bearer {proxies.KEY}"
        connection.request("POST", path, json.dumps({"model": MODEL, **body}), headers)
        yield connection


def events(connection: http.client.HTTPConnection) -> Iterator[Any]:
    """Yield the data of each event as soon as its bytes are here."""
    response = connection.getresponse()
    assert response.status == 200, response.read()
    unpack: Callable[[bytes], bytes] = bytes
    if response.headers.get("content-encoding") == "gzip":
        unpack = zlib.decompressobj(wbits=31).decompress
    text = b""
    while part := response.read1():
        text += unpack(part)
        *whole, text = re.split(rb"\r?\n\r?\n", text)
        for event in whole:
            for line in event.splitlines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line[6:])


def contents(connection: http.client.HTTPConnection) -> Iterator[str]:
    for event in events(connection):
        for choice in event["choices"]:
            if content := choice["delta"].get("content"):
                yield content


def test_the_first_token_comes_before_the_second_is_computed(
    served: Served, address: str, tried: Callable[[], None]
) -> None:
    served.wait_ready()
    with asked(address, "/v1/chat/completions", messages=QUESTION, stream=True, max_tokens=8) as connection:
        whole = "".join(contents(connection))
    assert whole
    with (
        served.decode_worker_stopped(),
        asked(address, "/v1/chat/completions", messages=QUESTION, stream=True, max_tokens=8) as connection,
    ):
        # A proxy that keeps events to itself has nothing to send: no other token comes while this waits.
        assert next(contents(connection))
    served.wait_ready()
    tried()


def test_a_client_that_leaves_its_stream_ends_it(served: Served, address: str, tried: Callable[[], None]) -> None:
    served.wait_ready()
    before = served.outcomes()
    with asked(address, "/v1/chat/completions", messages=QUESTION, stream=True, **LONG) as connection:
        assert next(contents(connection))
    wait_until(lambda: served.outcomes()["abort"] == before["abort"] + 1, WAIT_S, "the request is aborted")
    assert served.outcomes()["length"] == before["length"], "it did not run to its end"
    tried()


def test_a_client_that_leaves_before_its_answer_ends_it(
    served: Served, address: str, tried: Callable[[], None]
) -> None:
    served.wait_ready()
    before = served.outcomes()
    with TandemClient(served.grpc_address) as client, asked(address, "/v1/chat/completions", messages=QUESTION, **LONG):
        wait_until(lambda: client.server_info().num_requests == 1, WAIT_S, "the request is in hand")
    wait_until(lambda: served.outcomes()["abort"] == before["abort"] + 1, WAIT_S, "the request is aborted")
    assert served.outcomes()["length"] == before["length"], "it did not run to its end"
    tried()


def test_whole_answers_and_embeddings(served: Served, address: str, tried: Callable[[], None]) -> None:
    served.wait_ready()
    for path, body in (
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 8}),
        ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 8}),
        ("/v1/embeddings", {"input": ["Paris", "Rome"], "encoding_format": "float"}),
    ):
        with asked(address, path, **body) as connection:
            response = connection.getresponse()
            content = response.read()
        if response.headers.get("content-encoding") == "gzip":
            content = zlib.decompress(content, wbits=31)
        assert response.status == 200, content
        answer = json.loads(content)
        if path == "/v1/embeddings":
            assert [math.hypot(*item["embedding"]) for item in answer["data"]] == pytest.approx([1.0, 1.0], abs=1e-3)
        else:
            assert answer["usage"]["completion_tokens"] == 8 or answer["choices"][0]["finish_reason"] == "stop"
    tried()

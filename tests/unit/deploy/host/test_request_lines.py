"""Request lines from a real router to the launcher's terminal."""

import http.client
import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.deploy.host.request_lines import RequestLineServer
from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess


class Terminal:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def wait(self, text: str) -> str:
        """Returns the first line that contains `text`."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if text in line:
                    return line
            time.sleep(0.005)
        raise AssertionError(f"no {text!r} in {self.lines}")


def test_a_router_s_lines_are_shown_without_prompt_and_key(router_model_dir: Path) -> None:
    terminal = Terminal()
    server = RequestLineServer(terminal.lines.append)
    config = RouterConfig(str(router_model_dir), "fake", 64, grpc_port=0, http_port=0, worker_wait_timeout_s=0)
    config = replace(config, api_keys=("secret-key",), request_lines_socket=server.name)
    process = RouterProcess(config)
    try:
        host, _, port = process.start().http.rpartition(":")

        def post(key: str, request_id: str, **body: object) -> int:
            connection = http.client.HTTPConnection(host, int(port), timeout=10.0)
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-request-id": request_id}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            status = connection.getresponse().status
            connection.close()
            return status

        assert post("secret-key", "first", prompt="aaaa", max_tokens=3) == 503
        assert terminal.wait("> first").endswith("prompt_tokens=4 max_tokens=3 temperature=1")
        assert "unavailable" in terminal.wait("< first")
        # An unauthenticated client shows nothing.
        assert post("wrong-key", "second", prompt="a") == 401
        # Errors quote the client: control characters must not reach the terminal.
        assert post("secret-key", "third", prompt="a", logit_bias={"\x1b[2Jx": 1}) == 400
        assert "\\x1b[2Jx" in terminal.wait("! third")
        assert not [line for line in terminal.lines if "aaaa" in line or "-key" in line or "second" in line]
    finally:
        process.stop()
        server.close()


def test_it_leaves_nothing_behind() -> None:
    num_threads, num_files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    terminal = Terminal()
    server = RequestLineServer(terminal.lines.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"\0{server.name}")
        client.send(b"the last line")
        server.close()
        # Lines received before the end were shown.
        assert terminal.lines == ["the last line"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client, pytest.raises(ConnectionRefusedError):
        client.connect(f"\0{server.name}")
    assert (threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))) == (num_threads, num_files)

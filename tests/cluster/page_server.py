"""Serves the live page's files, with data of the test's own."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tandem.router.frontends.page.assets import FILES, PAGE, PREFIX, load_asset
from tandem.router.frontends.page.routes import CONTENT_SECURITY_POLICY
from tests.cluster.browser import Browser


class Handler(BaseHTTPRequestHandler):
    server: "Server"

    def do_GET(self) -> None:
        if self.path == "/live":
            self.server.num_asked += 1
            self.server.answer(self)
            return
        name = PAGE if self.path == "/" else self.path.removeprefix(PREFIX)
        if name not in FILES:
            self.send_error(404)
            return
        asset = load_asset(name)
        self.send_response(200)
        self.send_header("content-type", asset.media_type)
        self.send_header("content-security-policy", CONTENT_SECURITY_POLICY)
        self.end_headers()
        self.wfile.write(asset.content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep requests out of the test output."""


class Server(ThreadingHTTPServer):
    """Attributes: num_asked: requests for the page's data."""

    daemon_threads = True

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.num_asked = 0


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[Server, Browser]]:
    """Serve and open a page whose `/live` comes from `answer`."""
    with Server(answer) as server, Browser() as browser:
        Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        try:
            yield server, browser
        finally:
            server.shutdown()


def send_frames(request: BaseHTTPRequestHandler, *frames: dict[str, Any]) -> None:
    request.send_response(200)
    request.send_header("content-type", "text/event-stream")
    request.end_headers()
    for frame in frames:
        request.wfile.write(f"data: {json.dumps(frame)}\n\n".encode())
    request.wfile.flush()

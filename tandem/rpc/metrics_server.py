"""Metrics over HTTP, for processes without another HTTP port."""

import logging
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from tandem.config import parse_api_key
from tandem.rpc.auth import TokenSet, bearer_token

logger = logging.getLogger(__name__)

PATH = "/metrics"
# Timeout for a reader that neither sends nor receives.
REQUEST_TIMEOUT_S = 5.0
# Delay within which the serving thread notices `close`.
POLL_INTERVAL_S = 0.1


class MetricsServer:
    """Serves a registry at GET /metrics, with a thread per reader."""

    def __init__(self, registry: CollectorRegistry, host: str, api_keys: Sequence[str] = ()) -> None:
        """
        Args:
            api_keys: accepted bearer tokens, as "KEY" or "KEY MAX_PRIORITY"; empty admits everybody.

        Raises:
            OSError: the address is not local.
        """
        self._server = _Server(registry, host, TokenSet([parse_api_key(text).key for text in api_keys]))
        self.address = f"{host}:{self._server.server_address[1]}"
        thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_INTERVAL_S,), name="metrics", daemon=True
        )
        thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingTCPServer):
    """Unlike http.server's class, binds without a DNS lookup."""

    daemon_threads = True

    def __init__(self, registry: CollectorRegistry, host: str, keys: TokenSet) -> None:
        super().__init__((host, 0), _Handler)
        self.registry = registry
        self.keys = keys

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), OSError):
            logger.debug("the reader at %s went away", client_address)
        else:
            logger.exception("metrics could not be collected")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT_S
    server_version = "tandem"
    sys_version = ""

    def do_GET(self) -> None:
        if not self._may_read():
            self._answer(HTTPStatus.UNAUTHORIZED, b"an API key is needed\n", {"WWW-Authenticate": "Bearer"})
        elif self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"there is only {PATH} here\n".encode())
        else:
            self._answer(HTTPStatus.OK, generate_latest(self.server.registry), {"Content-Type": CONTENT_TYPE_LATEST})

    def _refuse(self) -> None:
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET is answered\n", {"Allow": "GET"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _may_read(self) -> bool:
        return not self.server.keys or bearer_token(self.headers.get("Authorization")) in self.server.keys

    def _answer(self, status: HTTPStatus, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Type": "text/plain; charset=utf-8"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("%s: %r", self.client_address, format % args)

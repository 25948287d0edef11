"""The HTTP server, on the router's loop."""

import asyncio
import contextlib
import socket

import uvicorn
from starlette.types import ASGIApp

from tandem.router.frontends.openai.closing_transport import MAX_DISCARDED_BYTES_PER_S, DiscardBudget
from tandem.router.frontends.openai.http_connection import BoundedProtocol, Keeper
from tandem.router.frontends.openai.listener import Listener
from tandem.rpc.tls import ClientPortTls

START_TIMEOUT_S = 10.0
STOP_GRACE_S = 1
POLL_S = 0.01
BACKLOG = 2048


class _Server(uvicorn.Server):
    """Counts connections before their TLS handshake; uvicorn first hears of them after it."""

    def __init__(self, config: uvicorn.Config, max_connections: int) -> None:
        super().__init__(config)
        self._max_connections = max_connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        budget = DiscardBudget(MAX_DISCARDED_BYTES_PER_S, asyncio.get_running_loop().time)

        def make_protocol(keeper: Keeper) -> BoundedProtocol:
            return BoundedProtocol(budget, keeper, config=self.config, server_state=self.server_state, app_state={})

        self.servers = [
            Listener(listening, make_protocol, self._max_connections, self.config.ssl)  # type: ignore[misc]
            for listening in sockets
        ]
        self.started = True


class HttpServer:
    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: ClientPortTls | None,
        max_connections: int,
        *,
        reuse_port: bool = False,
    ) -> None:
        """Binds the port; 0 picks a free one. Further connections than max_connections are refused.

        Raises ValueError: the port is taken or the address is not ours.
        """
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port)
        except OSError as error:
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_GRACE_S,
            ssl_context_factory=(lambda *_: tls.server_context()) if tls else None,
        )
        self._server = _Server(config, max_connections)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    self._task.result()
                    raise RuntimeError("the HTTP server ended while it started")
                await asyncio.sleep(POLL_S)

    def leave(self) -> None:
        """Refuses new connections and ends idle ones; requests under way go on."""
        self._server.config.timeout_graceful_shutdown = None
        self._server.should_exit = True

    async def stop(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, 2 * STOP_GRACE_S + 1)
        self._socket.close()

"""Requests to an application without sockets."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp


@dataclass
class HttpAnswer:
    status: int = 0
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        return [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]


async def http_request(app: ASGIApp, method: str, path: str, body: Any = None, key: str = "") -> HttpAnswer:
    # In a thread: a client's work is no turn of the server's loop.
    content = b"" if body is None else (await asyncio.to_thread(json.dumps, body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if key:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": headers,
        "server": ("test", 80),
        "scheme": "http",
        "state": {},
    }
    messages = [{"type": "http.request", "body": content}]
    answer = HttpAnswer()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        # The client stays connected.
        await asyncio.Future()

    async def send(message: Any) -> None:
        answer.status = message.get("status", answer.status)
        answer.body += message.get("body", b"")

    async with asyncio.timeout(10.0):
        await app(scope, receive, send)
    return answer

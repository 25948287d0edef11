"""Anthropic's header for the key, and its form of errors."""

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.frontends.anthropic.errors import error_body
from tandem.router.frontends.openai.streaming import to_json

PATH = "/v1/messages"


class AnthropicDoor:
    """ASGI middleware around all checks; other paths pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] == PATH or scope["path"].startswith(f"{PATH}/")):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if b"authorization" not in headers and (key := headers.get(b"x-api-key")) is not None:
            scope = {**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + key)]}
        request_id = scope["state"]["request_id"]
        start: Message = {}

        async def send_in_their_form(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"request-id", request_id.encode())]
                if message["status"] >= 400:
                    start = message
                    return
            elif start and (body := message.get("body")):
                body = to_json(_translated(start["status"], json.loads(body), request_id)).encode()
                headers = [(n, v) for n, v in start["headers"] if n != b"content-length"]
                start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
                await send(start)
                start = {}
                message = {**message, "body": body}
            elif start:
                await send(start)
                start = {}
            await send(message)

        await self._app(scope, receive, send_in_their_form)


def _translated(status: int, content: Any, request_id: str) -> dict[str, Any]:
    error = content["error"]
    return error_body(status, error["message"], error["param"], request_id)

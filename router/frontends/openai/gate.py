"""What every HTTP request passes before anything is read of it: the API key, and the size and pace of its body."""

import asyncio
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import UnauthenticatedError
from router.frontends.base import Door
from router.frontends.openai.errors import error_response, status_response

# Answered to everybody: what watches over the process has no key.
OPEN_PATHS = ("/health", "/ready")
# Between two parts of a body.
BODY_TIMEOUT_S = 30.0


class Gate:
    """ASGI middleware. Whose request it is stands in `scope["state"]["key"]`."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door
        self._max_body_bytes = door.config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if scope["path"] not in OPEN_PATHS:
            try:
                scope.setdefault("state", {})["key"] = self._door.identify(headers.get(b"authorization"))
            except UnauthenticatedError as error:
                response = error_response(error)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        # The HTTP parser has seen to it that this is a number of 64 bits at most.
        if int(headers.get(b"content-length", 0)) > self._max_body_bytes:
            refusal = self._too_large()
            await status_response(refusal.status_code, refusal.detail, refusal.headers)(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """While the body is read, this raises HTTPException."""
        num_bytes = 0
        is_read = False

        async def bounded() -> Any:
            nonlocal num_bytes, is_read
            if is_read:
                # Waits for the client to leave, which may take as long as its request.
                return await receive()
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await receive()
            except TimeoutError:
                raise _refusal(408, f"no part of the body came for {BODY_TIMEOUT_S:g} s") from None
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                is_read = not message.get("more_body", False)
                if num_bytes > self._max_body_bytes:
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> HTTPException:
        return _refusal(413, f"the body has more than {self._max_body_bytes} bytes")


def _refusal(status: int, message: str) -> HTTPException:
    # What is left of the body will not be read.
    return HTTPException(status, message, {"connection": "close"})

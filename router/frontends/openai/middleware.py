"""Checks of every HTTP request before it is read: API key, and size and pace of its body."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.errors import OverloadedError, UnauthenticatedError
from tandem.router.frontends.access import NO_ADMIN
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.errors import error_response, status_response
from tandem.router.frontends.page.assets import PAGE_PATHS

# Paths without authentication: probes and the page's files have no key.
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADMIN_PATHS = (LOAD_PATH, UNLOAD_PATH)
OPEN_PATHS = ("/health", "/ready", "/ping", *PAGE_PATHS)
STATUS_OVERLOADED = 429
# For the gap between two parts of a body, and for the whole body.
BODY_TIMEOUT_S = 30.0
WHOLE_BODY_TIMEOUT_S = 300.0


class AccessMiddleware:
    """ASGI middleware. Sets in `scope["state"]`: `key`; `client`, who takes turns with others for costly work; and
    `hold`, which counts bytes as in hand and raises OverloadedError."""

    def __init__(self, app: ASGIApp, frontend: Frontend) -> None:
        self._app = app
        self._frontend = frontend
        self._max_body_bytes = frontend.config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # The HTTP parser has checked that it is a number of at most 64 bits.
        num_announced = int(headers.get(b"content-length", 0))
        is_empty = not num_announced and b"transfer-encoding" not in headers
        body = _Body(receive, self._max_body_bytes, is_empty=is_empty)
        state = scope.setdefault("state", {})
        key = ""
        refusal: Response | None = None
        if scope["path"] in ADMIN_PATHS:
            state["key"] = state["client"] = ""
            refusal = self._refuse_other_than_admin(headers.get(b"authorization"), state["request_id"])
        elif scope["path"] not in OPEN_PATHS:
            try:
                key = state["key"] = self._frontend.identify(headers.get(b"authorization"), state["request_id"])
                state["client"] = key or (scope.get("client") or ("",))[0]
            except UnauthenticatedError as error:
                refusal = error_response(error)
        encoding = headers.get(b"content-encoding", "identity").strip().lower()
        if refusal is None and encoding not in ("identity", ""):
            refusal = status_response(415, f"bodies encoded as {encoding} are not taken: send it without that encoding")
        if refusal is None and num_announced > self._max_body_bytes:
            refusal = status_response(413, too_large(self._max_body_bytes))
        if refusal is not None:
            await refusal(scope, receive, body.closing(send))
            return
        with ExitStack() as held:
            # A request that outlives its connection takes the stack over.
            state["held"] = held
            hold = held.enter_context(self._frontend.access.hold_bytes(key))
            body.count = partial(self._count, hold, state["request_id"])
            state["hold"] = hold
            await self._app(scope, body.receive, body.closing(send))

    def _refuse_other_than_admin(self, authorization: str | None, request_id: str) -> Response | None:
        access = self._frontend.access
        if not access.has_admin:
            return status_response(403, NO_ADMIN)
        try:
            with self._frontend.refusals_counted(request_id):
                access.check_admin(authorization)
        except UnauthenticatedError as error:
            return error_response(error)
        return None

    def _count(self, hold: Callable[[int], None], request_id: str, num_bytes: int) -> None:
        try:
            with self._frontend.refusals_counted(request_id):
                hold(num_bytes)
        except OverloadedError as error:
            raise HTTPException(STATUS_OVERLOADED) from error


class _Body:
    """A request's body. `receive` raises HTTPException if it is too large or too slow."""

    def __init__(self, receive: Receive, max_bytes: int, *, is_empty: bool) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.count: Callable[[int], None] = lambda _: None
        self._is_read = is_empty
        self._deadline = asyncio.get_running_loop().time() + WHOLE_BODY_TIMEOUT_S

    async def receive(self) -> Message:
        if self._is_read:
            # Waits for the client to leave.
            return await self._receive()
        remaining_s = self._deadline - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(min(BODY_TIMEOUT_S, remaining_s)):
                message = await self._receive_part()
        except TimeoutError:
            if remaining_s < BODY_TIMEOUT_S:
                raise HTTPException(408, f"the body took longer than {WHOLE_BODY_TIMEOUT_S:g} s") from None
            raise HTTPException(408, f"no part of the body came for {BODY_TIMEOUT_S:g} s") from None
        if self._num_bytes > self._max_bytes:
            raise HTTPException(413, too_large(self._max_bytes))
        self.count(len(message.get("body", b"")))
        return message

    def closing(self, send: Send) -> Send:
        """Closes the connection after an answer to an unfinished body. The connection discards the rest."""

        async def closing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and not self._is_read:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        return closing_send

    async def _receive_part(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_read = not message.get("more_body", False)
        else:
            self._is_read = True
        return message


def too_large(max_bytes: int) -> str:
    return f"the body has more than {max_bytes} bytes"

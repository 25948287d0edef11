"""Headers around every HTTP answer, including refusals: the request id, and CORS for browsers."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.router.requests.client_ids import (
    REQUEST_ID_HEADER,
    TRACEPARENT,
    TRACESTATE,
    current_trace_context,
    request_id_of,
    trace_context_of,
)

_HEADER = REQUEST_ID_HEADER.encode()
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()


def with_cors(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Lets pages of these origins read answers; "*": all. Preflights carry no key, so this precedes authentication."""
    if not allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        # Keys are in a header that pages set themselves; CORS does not count that as credentials.
        allow_credentials=False,
        expose_headers=("X-Request-Id", "Retry-After"),
    )


class EnvelopeMiddleware:
    """Outermost ASGI middleware. Sets in `scope["state"]`: `request_id`; `is_head`; and `send`, the server's own."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        state = scope.setdefault("state", {})
        current_trace_context.set(trace_context_of(headers.get(_TRACEPARENT), headers.get(_TRACESTATE)))
        request_id = state["request_id"] = request_id_of(headers.get(_HEADER))
        state["send"] = send
        added = [(_HEADER, request_id.encode())]
        method = scope["method"]
        state["is_head"] = method == "HEAD"
        if method == "OPTIONS" and (b"content-length" in headers or b"transfer-encoding" in headers):
            # A preflight's body has no limit and no key, so it is not read.
            added.append((b"connection", b"close"))
        scope = {**scope, "root_path": self._root_path, "method": "GET" if method == "HEAD" else method}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, send_with_headers)

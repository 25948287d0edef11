"""The live page at `/` with its data, and the API's page at `/docs`. Pages are public; their data need the API key."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.streaming import Event, EventStream, begin_stream
from tandem.router.frontends.page.assets import DOCS, FILES, LIBRARY_FILES, PAGE, PAGES, PREFIX, Asset, load_asset
from tandem.router.observe.live.feed import LiveFeed, TooManyViewersError

# No foreign content, no scripts in the markup, no framing by other pages.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
# Swagger UI's stylesheet holds its icons.
DOCS_SECURITY_POLICY = CONTENT_SECURITY_POLICY.replace("img-src 'self'", "img-src 'self' data:")
_HEADERS = {
    # A restarted router may bring another page, so each load revalidates it.
    "cache-control": "no-cache",
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
# Viewers leave rarely, so retrying often is useless.
VIEWERS_RETRY_AFTER_S = 10
# Swagger UI has 1.5 MB. Sent in parts, a client that does not read holds one of them, and not for long.
PART_BYTES = 2**16
ASSET_TIMEOUT_S = 120.0


def add_page(app: FastAPI, frontend: Frontend, feed: LiveFeed) -> None:
    assets = {name: load_asset(name, frontend.config.root_path) for name in (*FILES, *LIBRARY_FILES)}

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        if not _wants_page(request.headers.get("accept", "")):
            frontend.identify(request.headers.get("authorization"), request.state.request_id)
            raise HTTPException(404)
        response = _asset_response(assets[PAGE], request)
        response.headers["vary"] = "Accept"
        return response

    @app.get(PAGES[DOCS], include_in_schema=False)
    async def docs(request: Request) -> Response:
        response = _asset_response(assets[DOCS], request)
        response.headers["content-security-policy"] = DOCS_SECURITY_POLICY
        return response

    @app.get(PREFIX + "{name}", include_in_schema=False)
    async def part(name: str, request: Request) -> Response:
        if name not in assets or name in PAGES:
            raise HTTPException(404)
        return _asset_response(assets[name], request)

    @app.get("/live", include_in_schema=False)
    async def live(request: Request) -> Response:
        if request.state.is_head:
            return Response(media_type=EventStream.media_type)
        try:
            return await begin_stream(_events(feed, request.state.key), request.receive)
        except TooManyViewersError as error:
            headers = {"retry-after": str(VIEWERS_RETRY_AFTER_S)}
            raise HTTPException(503, f"{error}; try again later", headers) from None


async def _events(feed: LiveFeed, key: str) -> AsyncGenerator[Event]:
    frames = feed.watch(key)
    try:
        async for frame in frames:
            yield "", frame
    finally:
        await frames.aclose()


def _wants_page(accept: str) -> bool:
    """Browsers ask for HTML by name; other clients may accept anything."""
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return "text/html" in kinds or "application/json" not in kinds


def _asset_response(asset: Asset, request: Request) -> Response:
    headers = {**_HEADERS, "etag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known:
        return Response(status_code=304, headers=headers)
    return AssetResponse(asset.content, headers={**headers, "content-type": asset.media_type})


class AssetResponse(Response):
    """A file, sent as fast as the client reads it. After ASSET_TIMEOUT_S the connection is closed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        ends = range(PART_BYTES, len(self.body) + PART_BYTES, PART_BYTES)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ASSET_TIMEOUT_S):
                for end in ends:
                    part = self.body[end - PART_BYTES : end]
                    await send({"type": "http.response.body", "body": part, "more_body": end < len(self.body)})

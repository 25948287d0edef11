"""/v1/responses: OpenAI's Responses API."""

import json
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Query, Request
from starlette.responses import Response

from tandem.router.errors import InvalidRequestError, UnknownResponseError
from tandem.router.frontends.access import key_digest
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.kept_responses import KeptResponse
from tandem.router.frontends.openai.off_loop import OffLoop
from tandem.router.frontends.openai.one_output import STREAMED
from tandem.router.frontends.response_exchange import RESPONSE, ResponseExchange
from tandem.router.frontends.responses.answer_schema import DeletedResponse, ItemList, ResponseObject
from tandem.router.frontends.responses.schema import ResponseRequest
from tandem.router.frontends.responses.serving import ResponseServing

MAX_LISTED = 100
# JSON escapes quotes, so no text holds it.
IN_BACKGROUND = b'"background":true'
LastEventId = Annotated[str | None, Header(include_in_schema=False)]


def add_responses(app: FastAPI, frontend: Frontend, responses: ResponseExchange) -> None:
    metrics = frontend.router.metrics
    metrics.add_gauge(
        "tandem_kept_responses", "Responses that clients may go on with", lambda: responses.kept.num_responses
    )
    metrics.add_gauge(
        "tandem_background_responses", "Responses in progress in the background", lambda: len(responses.background)
    )
    metrics.add_gauge("tandem_kept_responses_bytes", "Bytes that these hold", lambda: responses.kept.num_bytes)

    @app.post("/v1/responses", response_model=ResponseObject, responses={200: {"content": STREAMED}})
    async def create_response(body: ResponseRequest, request: Request, last_event_id: LastEventId = None) -> Response:
        """Answers a conversation, and keeps the answer to be continued."""
        return await ResponseServing(frontend, responses, body, request).serve(last_event_id)

    @app.get("/v1/responses/{response_id}")
    async def get_response(response_id: str, request: Request, stream: bool = False) -> ResponseObject:
        """Returns a kept response, or one in progress in the background."""
        found = await _find(frontend, responses, response_id, request)
        if stream:
            raise InvalidRequestError("a kept response is not streamed: leave out stream", "stream")
        return Response(found.answer, media_type="application/json")  # type: ignore[return-value]

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, request: Request) -> ResponseObject:
        """Cancels a response in progress in the background. One that has ended stays as it is."""
        with frontend.refusals_counted(request.state.request_id):
            found = None
            if response_id.startswith(RESPONSE):
                found = await responses.cancel(response_id, key_digest(request.state.key))
            if found is None:
                raise _unknown(response_id)
            if IN_BACKGROUND not in found.answer:
                raise InvalidRequestError(
                    "only a response in the background is cancelled: close the connection of another", "response_id"
                )
        return Response(found.answer, media_type="application/json")  # type: ignore[return-value]

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Forgets a kept response."""
        with frontend.refusals_counted(request.state.request_id):
            is_response = response_id.startswith(RESPONSE)
            if not is_response or not await responses.forget(response_id, key_digest(request.state.key)):
                raise _unknown(response_id)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> ItemList:
        """Lists a kept response's input."""
        found = await _find(frontend, responses, response_id, request)
        off_loop: OffLoop = request.app.state.off_loop
        items = await off_loop.run(request.state.client, len(found.input_items), json.loads, found.input_items)
        return page_of(items, limit, order, after)


def page_of(items: list[dict[str, Any]], limit: int, order: str, after: str | None) -> ItemList:
    """Args: items: oldest first; after: id of the item before the page."""
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    shown = items[start : start + limit]
    return ItemList(
        object="list",
        data=shown,
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=start + limit < len(items),
    )


async def _find(frontend: Frontend, responses: ResponseExchange, response_id: str, request: Request) -> KeptResponse:
    with frontend.refusals_counted(request.state.request_id):
        found = None
        if response_id.startswith(RESPONSE):
            found = await responses.find(response_id, key_digest(request.state.key), with_earlier=False)
        if found is None:
            raise _unknown(response_id)
    return found


def _unknown(response_id: str) -> UnknownResponseError:
    return UnknownResponseError(f"no response {response_id!r} is kept", "response_id")

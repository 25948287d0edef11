"""/v1/responses: OpenAI's Responses API."""

import json
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Query, Request
from starlette.responses import Response

from tandem.router.errors import UnknownPreviousResponseError, UnknownResponseError
from tandem.router.frontends.access import key_digest
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.kept_responses import KeptResponse
from tandem.router.frontends.openai.body import run_beside
from tandem.router.frontends.openai.chat import begin_chat
from tandem.router.frontends.openai.off_loop import OffLoop
from tandem.router.frontends.openai.one_output import STREAMED, NamedEventStream, OneOutput, fields_named, respond
from tandem.router.frontends.openai.request import count_unknown_fields
from tandem.router.frontends.openai.streaming import to_json
from tandem.router.frontends.openai.tools_schema import ChatRequest
from tandem.router.frontends.response_exchange import ResponseExchange
from tandem.router.frontends.responses.answer import ResponseAnswer
from tandem.router.frontends.responses.kept_items import read_items, write_items
from tandem.router.frontends.responses.schema import (
    DeletedResponse,
    Item,
    ItemList,
    ResponseObject,
    ResponseRequest,
)
from tandem.router.frontends.responses.translation import NAMES, chat_of, items_of

MAX_LISTED = 100
LastEventId = Annotated[str | None, Header(include_in_schema=False)]


def add_responses(app: FastAPI, frontend: Frontend, responses: ResponseExchange) -> None:
    metrics = frontend.router.metrics
    metrics.add_gauge(
        "tandem_kept_responses", "Responses that clients may go on with", lambda: responses.kept.num_responses
    )
    metrics.add_gauge("tandem_kept_responses_bytes", "Bytes that these hold", lambda: responses.kept.num_bytes)

    @app.post("/v1/responses", response_model=ResponseObject, responses={200: {"content": STREAMED}})
    async def create_response(body: ResponseRequest, request: Request, last_event_id: LastEventId = None) -> Response:
        """Answers a conversation, and keeps the answer to be continued."""
        return await serve_response(frontend, responses, body, request, last_event_id)

    @app.get("/v1/responses/{response_id}")
    async def get_response(response_id: str, request: Request) -> ResponseObject:
        """Returns a kept response."""
        found = await _find(frontend, responses, response_id, request)
        return Response(found.answer, media_type="application/json")  # type: ignore[return-value]

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Forgets a kept response."""
        with frontend.refusals_counted(request.state.request_id):
            if not await responses.forget(response_id, key_digest(request.state.key)):
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


async def serve_response(
    frontend: Frontend,
    responses: ResponseExchange,
    body: ResponseRequest,
    request: Request,
    last_event_id: str | None,
) -> Response:
    count_unknown_fields(frontend, body)
    owner = key_digest(request.state.key)
    previous: KeptResponse | None = None
    with frontend.refusals_counted(request.state.request_id):
        if body.previous_response_id is not None:
            previous = await _previous(responses, body.previous_response_id, owner)
            # The body is small, and the conversation may be a thousand times larger.
            request.state.hold(previous.num_conversation_bytes)
            request.state.num_bytes += previous.num_conversation_bytes
        chat_body, input_items = await run_beside(request, _read, body, previous)
    with fields_named(NAMES):
        chat = await begin_chat(frontend, chat_body, request, last_event_id)
    response_id = responses.new_id()
    output = OneOutput(frontend, chat, response_id)

    def keep(response: dict[str, Any]) -> None:
        if body.store is False:
            return
        responses.kept.keep(
            response_id,
            owner,
            answer=to_json(response).encode(),
            input_items=input_items,
            output_items=to_json(response["output"]).encode(),
            previous=previous,
        )

    form = ResponseAnswer(body, output, response_id, frontend.config.model_name, keep)
    return await respond(output, form, request.receive, NamedEventStream if body.stream else None)


def _read(body: ResponseRequest, previous: KeptResponse | None) -> tuple[ChatRequest, bytes]:
    """Returns the conversation as a chat, and the body's own items to keep."""
    items = items_of(body)
    earlier: list[Item] = []
    if previous is not None:
        parts = [part for turn in previous.turns() for part in (turn.input_items, turn.output_items)]
        earlier = read_items(parts, "previous_response_id")
    return chat_of(body, [*earlier, *items]), b"" if body.store is False else write_items(items)


async def _previous(responses: ResponseExchange, response_id: str, owner: str) -> KeptResponse:
    found = await responses.find(response_id, owner, with_earlier=True)
    if found is None:
        raise UnknownPreviousResponseError(
            f"no response {response_id!r} is kept: send the whole conversation as input", "previous_response_id"
        )
    return found


async def _find(frontend: Frontend, responses: ResponseExchange, response_id: str, request: Request) -> KeptResponse:
    with frontend.refusals_counted(request.state.request_id):
        found = await responses.find(response_id, key_digest(request.state.key), with_earlier=False)
        if found is None:
            raise _unknown(response_id)
    return found


def _unknown(response_id: str) -> UnknownResponseError:
    return UnknownResponseError(f"no response {response_id!r} is kept", "response_id")

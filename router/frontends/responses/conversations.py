"""/v1/conversations: OpenAI's Conversations API, over the kept responses."""

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from tandem.router.errors import UnknownConversationError
from tandem.router.frontends.access import key_digest
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.kept_responses import KeptResponse
from tandem.router.frontends.openai.body import run_beside
from tandem.router.frontends.openai.lenient import LenientRequest
from tandem.router.frontends.openai.off_loop import OffLoop
from tandem.router.frontends.openai.request import count_unknown_fields
from tandem.router.frontends.openai.streaming import to_json
from tandem.router.frontends.response_exchange import CONVERSATION, ResponseExchange
from tandem.router.frontends.responses.answer_schema import ItemList
from tandem.router.frontends.responses.kept_items import write_items
from tandem.router.frontends.responses.routes import MAX_LISTED, page_of
from tandem.router.frontends.responses.schema import Item, Metadata
from tandem.router.text.prompt_encoder import MAX_MESSAGES

PATH = "/v1/conversations"
_NONE = b"[]"
_Items = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class NewConversation(LenientRequest):
    items: _Items | None = None
    metadata: Metadata | None = None


class ChangedConversation(LenientRequest):
    metadata: Metadata | None = None


class NewItems(LenientRequest):
    items: _Items = Field(min_length=1)


class ConversationObject(BaseModel):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(BaseModel):
    id: str
    object: Literal["conversation.deleted"]
    deleted: bool


def add_conversations(app: FastAPI, frontend: Frontend, responses: ResponseExchange) -> None:
    async def find(conversation_id: str, request: Request, *, with_items: bool = False) -> KeptResponse:
        with frontend.refusals_counted(request.state.request_id):
            found = None
            if conversation_id.startswith(CONVERSATION):
                owner = key_digest(request.state.key)
                found = await responses.find(conversation_id, owner, with_earlier=with_items)
            if found is None:
                raise _unknown(conversation_id)
        return found

    @app.post(PATH)
    async def create_conversation(body: NewConversation, request: Request) -> ConversationObject:
        """Begins a conversation that responses add to."""
        count_unknown_fields(frontend, body)
        conversation = ConversationObject(
            id=responses.new_id(CONVERSATION),
            object="conversation",
            created_at=int(time.time()),
            metadata=body.metadata or {},
        )
        answer = to_json(conversation.model_dump()).encode()
        owner = key_digest(request.state.key)
        input_items = await run_beside(request, write_items, body.items) if body.items else b""
        kept = responses.kept
        kept.keep(conversation.id, owner, answer=answer, input_items=_NONE, output_items=_NONE, previous=None)
        if input_items:
            kept.extend(conversation.id, owner, input_items=input_items, output_items=_NONE)
        return conversation

    @app.get(f"{PATH}/{{conversation_id}}")
    async def get_conversation(conversation_id: str, request: Request) -> ConversationObject:
        """Describes a conversation."""
        found = await find(conversation_id, request)
        return Response(found.answer, media_type="application/json")  # type: ignore[return-value]

    @app.post(f"{PATH}/{{conversation_id}}")
    async def change_conversation(
        conversation_id: str, body: ChangedConversation, request: Request
    ) -> ConversationObject:
        """Replaces a conversation's metadata."""
        count_unknown_fields(frontend, body)
        found = json.loads((await find(conversation_id, request)).answer)
        answer = to_json({**found, "metadata": body.metadata or {}}).encode()
        with frontend.refusals_counted(request.state.request_id):
            if not await responses.change(conversation_id, key_digest(request.state.key), answer):
                raise _unknown(conversation_id)
        return Response(answer, media_type="application/json")  # type: ignore[return-value]

    @app.delete(f"{PATH}/{{conversation_id}}")
    async def delete_conversation(conversation_id: str, request: Request) -> DeletedConversation:
        """Forgets a conversation. Its responses stay."""
        await find(conversation_id, request)
        with frontend.refusals_counted(request.state.request_id):
            await responses.forget(conversation_id, key_digest(request.state.key))
        return DeletedConversation(id=conversation_id, object="conversation.deleted", deleted=True)

    @app.post(f"{PATH}/{{conversation_id}}/items")
    async def add_items(conversation_id: str, body: NewItems, request: Request) -> ItemList:
        """Appends items to a conversation."""
        count_unknown_fields(frontend, body)
        await find(conversation_id, request)
        items = await run_beside(request, write_items, body.items)
        with frontend.refusals_counted(request.state.request_id):
            owner = key_digest(request.state.key)
            if not await responses.extend(conversation_id, owner, input_items=items, output_items=_NONE):
                raise _unknown(conversation_id)
        shown = await run_beside(request, json.loads, items)
        return page_of(shown, len(shown), "asc", None)

    @app.get(f"{PATH}/{{conversation_id}}/items")
    async def list_items(
        conversation_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> ItemList:
        """Lists a conversation's items."""
        return page_of(await read(conversation_id, request), limit, order, after)

    @app.get(f"{PATH}/{{conversation_id}}/items/{{item_id}}")
    async def get_item(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
        """Returns one item of a conversation."""
        items = await read(conversation_id, request)
        with frontend.refusals_counted(request.state.request_id):
            for item in items:
                if item["id"] == item_id:
                    return item
            raise UnknownConversationError(f"the conversation has no item {item_id!r}", "item_id")

    async def read(conversation_id: str, request: Request) -> list[dict[str, Any]]:
        found = await find(conversation_id, request, with_items=True)
        num_bytes = found.num_conversation_bytes
        request.state.hold(num_bytes)
        off_loop: OffLoop = request.app.state.off_loop
        return await off_loop.run(request.state.client, num_bytes, _joined, found.item_parts())


def _joined(parts: Sequence[bytes]) -> list[dict[str, Any]]:
    return [item for part in parts for item in json.loads(part)]


def _unknown(conversation_id: str) -> UnknownConversationError:
    return UnknownConversationError(f"no conversation {conversation_id!r} is kept", "conversation_id")

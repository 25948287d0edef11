"""Serves one request of POST /v1/responses."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response

from tandem.router.errors import (
    RequestError,
    RequestTooLargeError,
    UnknownConversationError,
    UnknownPreviousResponseError,
)
from tandem.router.frontends.access import key_digest
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.kept_responses import KeptResponse
from tandem.router.frontends.openai.body import run_beside
from tandem.router.frontends.openai.chat import begin_chat
from tandem.router.frontends.openai.chat_plan import ChatPlan, plan_chat
from tandem.router.frontends.openai.errors import json_response
from tandem.router.frontends.openai.one_output import NamedEventStream, OneOutput, compute, fields_named, respond
from tandem.router.frontends.openai.request import count_unknown_fields
from tandem.router.frontends.openai.streaming import to_json
from tandem.router.frontends.openai.tools_schema import ChatRequest
from tandem.router.frontends.response_exchange import CONVERSATION, RESPONSE, ResponseExchange
from tandem.router.frontends.responses.answer import ResponseAnswer
from tandem.router.frontends.responses.kept_items import read_items, write_items
from tandem.router.frontends.responses.schema import Item, ResponseRequest
from tandem.router.frontends.responses.translation import NAMES, chat_of, items_of
from tandem.router.frontends.responses.truncation import fitting, max_prompt_tokens


class ResponseServing:
    def __init__(
        self, frontend: Frontend, responses: ResponseExchange, body: ResponseRequest, request: Request
    ) -> None:
        self._frontend = frontend
        self._responses = responses
        self._body = body
        self._request = request
        self._owner = key_digest(request.state.key)
        self._response_id = responses.new_id()
        # The last turn that this response continues.
        self._previous: KeptResponse | None = None
        self._input_items = b""

    async def serve(self, last_event_id: str | None) -> Response:
        """Raises RequestError, ClientGoneError."""
        frontend, body, request = self._frontend, self._body, self._request
        count_unknown_fields(frontend, body)
        with fields_named(NAMES):
            with frontend.refusals_counted(request.state.request_id):
                if body.background:
                    self._responses.background.check_room()
                self._previous = await self._find_previous()
                chat_body = await self._chat_body()
            chat = await begin_chat(frontend, chat_body, request, last_event_id)
        output = OneOutput(frontend, chat, self._response_id)
        form = ResponseAnswer(body, output, self._response_id, chat.plan.model.name, self._keep)
        if body.background:
            return await self._begin_in_background(output, form)
        return await respond(output, form, request.receive, NamedEventStream if body.stream else None)

    async def _find_previous(self) -> KeptResponse | None:
        body, state = self._body, self._request.state
        if (name := body.previous_response_id or body.conversation_id) is None:
            return None
        found = None
        if name.startswith(RESPONSE if body.conversation_id is None else CONVERSATION):
            found = await self._responses.find(name, self._owner, with_earlier=True)
        if found is None:
            if body.conversation_id is not None:
                raise UnknownConversationError(f"no conversation {name!r} is kept", "conversation")
            raise UnknownPreviousResponseError(
                f"no response {name!r} is kept: send the whole conversation as input", "previous_response_id"
            )
        # A conversation goes on changing; its turns do not.
        previous = found if body.conversation_id is None else found.previous
        if previous is not None:
            # The body is small, and the conversation may be a thousand times larger.
            state.hold(previous.num_conversation_bytes)
            state.num_bytes += previous.num_conversation_bytes
        return previous

    async def _chat_body(self) -> ChatRequest:
        items: Sequence[Item] = await run_beside(self._request, self._read)
        if self._body.truncation == "auto":
            items = await fitting(items, self._fits)
        return await run_beside(self._request, chat_of, self._body, items)

    def _read(self) -> list[Item]:
        """Returns the conversation."""
        body, previous = self._body, self._previous
        items, earlier = items_of(body), list[Item]()
        if previous is not None:
            earlier = read_items(previous.item_parts(), "previous_response_id")
        if body.store is not False or body.conversation_id is not None:
            self._input_items = write_items(items)
        return [*earlier, *items]

    async def _fits(self, items: Sequence[Item]) -> bool:
        frontend, body = self._frontend, self._body
        try:
            plan = await run_beside(self._request, self._plan, items)
            with frontend.admission(self._request.state.key):
                prompt = await frontend.tokenize(plan.prompt)
        except RequestTooLargeError:
            return False
        return len(prompt.token_ids) <= max_prompt_tokens(frontend, body.max_output_tokens)

    def _plan(self, items: Sequence[Item]) -> ChatPlan:
        return plan_chat(self._frontend, chat_of(self._body, items))

    async def _keep(self, response: dict[str, Any]) -> None:
        output_items = to_json(response["output"]).encode()
        # Before it is stored: a failure here ends a response in the background, and that is stored too.
        if (conversation_id := self._body.conversation_id) is not None:
            await self._responses.extend(
                conversation_id, self._owner, input_items=self._input_items, output_items=output_items
            )
        if self._body.store is not False:
            self._store(response, output_items)

    def _store(self, response: dict[str, Any], output_items: bytes) -> None:
        self._responses.kept.keep(
            self._response_id,
            self._owner,
            answer=to_json(response).encode(),
            input_items=self._input_items,
            output_items=output_items,
            previous=self._previous,
        )

    async def _begin_in_background(self, output: OneOutput, form: ResponseAnswer) -> Response:
        # The request's bytes are in hand until its end.
        held: ExitStack = self._request.state.held.pop_all()

        def look() -> KeptResponse:
            answer = to_json(form.whole()).encode()
            return KeptResponse(self._response_id, self._owner, 0.0, answer, self._input_items, b"[]", None)

        async def work() -> None:
            with held:
                try:
                    await compute(output, form)
                except (RequestError, asyncio.CancelledError) as error:
                    if isinstance(error, RequestError):
                        form.fail(error)
                    else:
                        form.cancel()
                    response = form.whole()
                    self._store(response, to_json(response["output"]).encode())

        created = json_response(form.whole())
        self._responses.background.start(self._response_id, self._owner, look, work())
        # A task that is cancelled before it begins runs none of its code.
        await asyncio.sleep(0)
        return created

"""/v1/messages: Anthropic's Messages API."""

from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from starlette.responses import Response

from tandem.router.errors import RequestTooLargeError
from tandem.router.frontends.anthropic.answer import MessageAnswer, MessageStream
from tandem.router.frontends.anthropic.context_edits import Body, ContextEdits
from tandem.router.frontends.anthropic.door import PATH
from tandem.router.frontends.anthropic.schema import (
    AnthropicErrorBody,
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    OriginalTokens,
    TokenCount,
)
from tandem.router.frontends.anthropic.translation import NAMES, chat_of, has_cache_marks
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.body import run_beside
from tandem.router.frontends.openai.chat import begin_chat, count_prompt_tokens
from tandem.router.frontends.openai.chat_plan import ChatPlan, plan_chat
from tandem.router.frontends.openai.errors import described_error
from tandem.router.frontends.openai.one_output import STREAMED, OneOutput, fields_named, respond
from tandem.router.frontends.openai.request import count_unknown_fields

LastEventId = Annotated[str | None, Header(include_in_schema=False)]


def add_messages(app: FastAPI, frontend: Frontend) -> None:
    errors: dict[int | str, dict[str, Any]] = {
        status: described_error(AnthropicErrorBody, described["description"])
        for status, described in app.router.responses.items()
    }

    @app.post(PATH, response_model=MessageObject, responses={**errors, 200: {"content": STREAMED}})
    async def create_message(body: MessagesRequest, request: Request, last_event_id: LastEventId = None) -> Response:
        """Answers a conversation."""
        count_unknown_fields(frontend, body)
        request_id = request.state.request_id
        with fields_named(NAMES):
            with frontend.refusals_counted(request_id):
                edits = ContextEdits()
                body = await _edited(frontend, body, request, edits)
                chat_body = await run_beside(request, chat_of, body, body.max_tokens)
            chat = await begin_chat(frontend, chat_body, request, last_event_id)
        output = OneOutput(frontend, chat, f"msg_{request_id}")
        form = MessageAnswer(
            output,
            request_id,
            chat.plan.model.name,
            shows_cached=has_cache_marks(body),
            applied_edits=edits.applied if body.context_management is not None else None,
        )
        return await respond(output, form, request.receive, MessageStream if body.stream else None)

    @app.post(f"{PATH}/count_tokens", responses=errors, response_model_exclude_none=True)
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Counts a request's prompt tokens."""
        count_unknown_fields(frontend, body)
        with fields_named(NAMES):
            with frontend.refusals_counted(request.state.request_id):
                edits = ContextEdits()
                body = await _edited(frontend, body, request, edits)
                chat_body = await run_beside(request, chat_of, body, None)
            num_tokens = await count_prompt_tokens(frontend, chat_body, request)
        if body.context_management is None:
            return TokenCount(input_tokens=num_tokens)
        num_original = num_tokens if edits.num_original_tokens is None else edits.num_original_tokens
        return TokenCount(
            input_tokens=num_tokens, context_management=OriginalTokens(original_input_tokens=num_original)
        )


async def _edited(frontend: Frontend, body: Body, request: Request, edits: ContextEdits) -> Body:
    if body.context_management is None:
        return body

    async def count(edited: CountTokensRequest) -> int | None:
        plan = await run_beside(request, _plan, frontend, edited)
        with frontend.admission(request.state.key):
            try:
                return len((await frontend.tokenize(plan.prompt)).token_ids)
            except RequestTooLargeError:
                return None

    return await edits.apply(body, body.context_management, count)


def _plan(frontend: Frontend, body: CountTokensRequest) -> ChatPlan:
    return plan_chat(frontend, chat_of(body, None))

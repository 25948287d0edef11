"""/v1/messages: Anthropic's Messages API."""

from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from starlette.responses import Response

from tandem.router.frontends.anthropic.answer import MessageAnswer, MessageStream
from tandem.router.frontends.anthropic.door import PATH
from tandem.router.frontends.anthropic.schema import (
    AnthropicErrorBody,
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    TokenCount,
)
from tandem.router.frontends.anthropic.translation import NAMES, chat_of, has_cache_marks
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.body import run_beside
from tandem.router.frontends.openai.chat import begin_chat, count_prompt_tokens
from tandem.router.frontends.openai.one_output import STREAMED, OneOutput, fields_named, respond
from tandem.router.frontends.openai.request import count_unknown_fields

LastEventId = Annotated[str | None, Header(include_in_schema=False)]


def add_messages(app: FastAPI, frontend: Frontend) -> None:
    errors: dict[int | str, dict[str, Any]] = {
        status: {**described, "model": AnthropicErrorBody} for status, described in app.router.responses.items()
    }

    @app.post(PATH, response_model=MessageObject, responses={**errors, 200: {"content": STREAMED}})
    async def create_message(body: MessagesRequest, request: Request, last_event_id: LastEventId = None) -> Response:
        """Answers a conversation."""
        count_unknown_fields(frontend, body)
        request_id = request.state.request_id
        with fields_named(NAMES):
            with frontend.refusals_counted(request_id):
                chat_body = await run_beside(request, chat_of, body, body.max_tokens)
            chat = await begin_chat(frontend, chat_body, request, last_event_id)
        output = OneOutput(frontend, chat, f"msg_{request_id}")
        form = MessageAnswer(output, request_id, frontend.config.model_name, shows_cached=has_cache_marks(body))
        return await respond(output, form, request.receive, MessageStream if body.stream else None)

    @app.post(f"{PATH}/count_tokens", responses=errors)
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Counts a request's prompt tokens."""
        count_unknown_fields(frontend, body)
        with fields_named(NAMES):
            with frontend.refusals_counted(request.state.request_id):
                chat_body = await run_beside(request, chat_of, body, None)
            num_tokens = await count_prompt_tokens(frontend, chat_body, request)
        return TokenCount(input_tokens=num_tokens)

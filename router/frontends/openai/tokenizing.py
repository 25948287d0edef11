"""/tokenize, /detokenize and /tokenizer_info, in vLLM's forms."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.body import run_beside
from tandem.router.frontends.openai.chat_plan import chat_prompt, check_arguments
from tandem.router.frontends.openai.errors import json_text_response
from tandem.router.frontends.openai.foreign_prompts import FOREIGN_PROMPTS, OTHER_CONVERSATIONS, TRUNCATION
from tandem.router.frontends.openai.lenient import LenientRequest, Unserved
from tandem.router.frontends.openai.long_lists import list_text
from tandem.router.frontends.openai.prompt_logprobs import object_text
from tandem.router.frontends.openai.request import count_unknown_fields
from tandem.router.frontends.openai.schema import TokenIds
from tandem.router.frontends.openai.streaming import to_json
from tandem.router.frontends.openai.tools_schema import Message, TemplateFields
from tandem.router.text.chat import Chat
from tandem.router.text.prompt_encoder import MAX_MESSAGES


class TokenizeRequest(TemplateFields, LenientRequest):
    """A text or a conversation, with the chat template's options."""

    unserved: ClassVar[Mapping[str, Unserved]] = FOREIGN_PROMPTS | OTHER_CONVERSATIONS | TRUNCATION

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    # By default a text gets the model's BOS; the chat template decides for a conversation.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(BaseModel):
    """Special tokens are further fields, for example `bos_token`."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str | None
    chat_template: str | None
    model_max_length: int
    eos_token: str | None = None


class DetokenizeRequest(LenientRequest):
    model: str | None = None
    tokens: TokenIds


class DetokenizeAnswer(BaseModel):
    prompt: str


def add_tokenizing(app: FastAPI, frontend: Frontend) -> None:
    @app.post("/tokenize", response_model=TokenizeAnswer)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Tokenizes a text or a conversation."""
        count_unknown_fields(frontend, body)
        with frontend.refusals_counted(request.state.request_id):
            frontend.served_model(body.model or "")
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequestError("one of prompt and messages is needed", "prompt")
            with frontend.admission(request.state.key):
                token_ids = await _tokens(frontend, body, request)
                fields = {"count": len(token_ids), "max_model_len": frontend.config.max_model_len}
                made = {"tokens": await list_text(token_ids)}
                spelled = body.return_token_strs
                made["token_strs"] = await list_text(token_ids, frontend.tokenizer.spelling) if spelled else "null"
        return json_text_response(object_text(fields, made))

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> TokenizerInfo:
        """Describes the tokenizer for programs that tokenize here."""
        return TokenizerInfo(**frontend.tokenizer.description, model_max_length=frontend.config.max_model_len)

    @app.post("/detokenize", response_model=DetokenizeAnswer)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Turns tokens into text, including special ones."""
        count_unknown_fields(frontend, body)
        with frontend.refusals_counted(request.state.request_id):
            frontend.served_model(body.model or "")
            with frontend.admission(request.state.key):
                text = await frontend.text_of(body.tokens)
        return json_text_response(to_json({"prompt": text}))


async def _tokens(frontend: Frontend, body: TokenizeRequest, request: Request) -> list[int]:
    if body.prompt is not None:
        return await frontend.token_ids(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    chat = await run_beside(request, _chat, frontend, body)
    return await frontend.token_ids(chat, add_special_tokens=bool(body.add_special_tokens))


def _chat(frontend: Frontend, body: TokenizeRequest) -> Chat | list[dict[str, Any]]:
    messages = body.messages or []
    check_arguments(messages)
    return chat_prompt(frontend, messages, body, body.tools or [])

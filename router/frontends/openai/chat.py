"""POST /v1/chat/completions."""

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.errors import InvalidRequestError
from router.frontends.base import Frontend
from router.frontends.openai.answers import Answer, ChoiceBuffer, token_text
from router.frontends.openai.prompt_logprobs import WantedLogprobs
from router.frontends.openai.request import (
    begin_all,
    check_num_choices,
    count_unknown_fields,
    sampling_options,
    structured_output,
)
from router.frontends.openai.resumable import is_resumable, last_event, make_stream, recall_stream
from router.frontends.openai.schema import ChatCompletionRequest
from tandem.sampling_params import TokenLogprobs


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def opening(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        text, token_ids, logprobs = buffer.take_unsent()
        return self._choice(index, buffer, "message", {"role": "assistant", "content": text}, token_ids, logprobs)

    def delta(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        text, token_ids, logprobs = buffer.take_unsent()
        return self._choice(index, buffer, "delta", {"content": text} if text else {}, token_ids, logprobs)

    async def own_fields(self) -> dict[str, str]:
        if self.wanted.listed is None:
            return {}
        texts, logprobs = self.prompt_texts(0)
        return {"prompt_logprobs": await texts.listed(logprobs)}

    def _choice(
        self,
        index: int,
        buffer: ChoiceBuffer,
        name: str,
        message: dict[str, str],
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
    ) -> dict[str, Any]:
        content = [self._token_logprob(token_id, entry) for token_id, entry in zip(token_ids, logprobs, strict=False)]
        return {
            "index": index,
            name: message,
            "logprobs": {"content": content} if content else None,
            "finish_reason": buffer.finish_reason or None,
        }

    def _token_logprob(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(t.token_id, t.logprob) for t in entry.top]
        return {**self._entry(token_id, entry.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._frontend.tokenizer.token_piece(token_id)
        return {"token": token_text(piece), "logprob": logprob, "bytes": list(piece)}


async def serve_chat(
    frontend: Frontend, body: ChatCompletionRequest, request: Request, last_event_id: str | None
) -> Response:
    """Raises RequestError, ClientGoneError."""
    key, request_id = request.state.key, request.state.request_id
    count_unknown_fields(frontend, body)
    with frontend.refusals_counted(request_id):
        frontend.check_model(body.model or "")
        check_num_choices(1, body.n)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise InvalidRequestError("max_tokens and max_completion_tokens differ: send one of them", "max_tokens")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wanted_logprobs = WantedLogprobs.of(body)
        options = sampling_options(frontend, body, max_tokens, num_logprobs, wanted_logprobs.num_top)
        wanted = structured_output(body)
        frontend.check_num_messages(len(body.messages))
        resumable = is_resumable(body, options, 1)
        last = last_event(last_event_id, is_resumable=resumable)
        with frontend.admission(key, body.n or 1, is_resumed=last is not None):
            recalled = await recall_stream(frontend, key, last, request.state.hold) if last else None
            options = replace(options, grammar=await frontend.grammar(wanted))
            prompt = await frontend.tokenize([{"role": m.role, "content": m.text} for m in body.messages])
        frontend.check_prompt_logprobs(len(prompt.token_ids), wanted_logprobs.num_top, request.state.hold)
        stream = make_stream(body, prompt, key, ChatAnswer.answer_id(request_id), recalled) if resumable else None
        # Where neither client nor model names a limit, an answer may fill the model's length.
        generations = begin_all(
            frontend, [prompt], options, body, key, frontend.sampling_defaults.max_tokens, stream, request_id
        )
    answer = ChatAnswer(frontend, [prompt], generations, request_id, stream=stream, wanted=wanted_logprobs)
    return await answer.respond(body, request.receive)

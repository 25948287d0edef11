"""POST /v1/completions."""

import asyncio
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.base import Frontend, PromptInput
from tandem.router.frontends.generation import Piece
from tandem.router.frontends.openai.answers import Answer, ChoiceBuffer
from tandem.router.frontends.openai.prompt_logprobs import EchoTexts, object_text, slices_of
from tandem.router.frontends.openai.request import (
    WantedLogprobs,
    cache_namespace,
    check_num_choices,
    check_num_prompt_tokens,
    checked_grammar,
    count_unknown_fields,
    prompt_cut,
    structured_output,
)
from tandem.router.frontends.openai.resumable import is_resumable, last_event, make_stream, recall_stream
from tandem.router.frontends.openai.sampling import sampling_options
from tandem.router.frontends.openai.schema import CompletionRequest
from tandem.router.requests.request_spec import RequestSpec
from tandem.sampling_params import TokenLogprobs

DEFAULT_MAX_TOKENS = 16


class CompletionAnswer(Answer):
    """Attributes: has_output: False if the client wants only its prompts back."""

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"
    has_output = True

    def shown(self, piece: Piece) -> Piece:
        if self.has_output:
            return piece
        return Piece(0, [], "", [], "length" if piece.finish_reason else "")

    def num_output_tokens(self) -> int:
        return super().num_output_tokens() if self.has_output else 0

    async def choice_text(self, index: int, buffer: ChoiceBuffer) -> str:
        return await self.delta_text(index, buffer)

    async def delta_text(self, index: int, buffer: ChoiceBuffer) -> str:
        token_ids, entries = buffer.token_ids, buffer.logprobs
        buffer.logprobs = []
        choice = self.delta(index, buffer)
        is_first, buffer.is_begun = not buffer.is_begun, True
        made: dict[str, str] = {}
        output = EchoTexts()
        for number, piece in enumerate(slices_of(entries)):
            if number:
                await asyncio.sleep(0)
            output.add(self._logprobs(buffer, token_ids[piece], entries[piece]))
        if entries:
            made["logprobs"] = EchoTexts().before(output)
        if is_first and self._returns_ids:
            made["prompt_token_ids"] = await self.prompt_ids(index)
        if is_first and self.wanted.num_top is not None:
            texts, logprobs = self.prompt_texts(index)
            if self.wanted.echoed is not None:
                made["logprobs"] = (await texts.echoed(logprobs)).before(output)
            if self.wanted.listed is not None:
                made["prompt_logprobs"] = await texts.listed(logprobs)
        return object_text(choice, made)

    def choice(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        return self.delta(index, buffer)

    def delta(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        text, token_ids, _ = buffer.take_unsent()
        echo, buffer.echo = buffer.echo, ""
        buffer.num_characters += len(echo)
        return {
            "index": index,
            "text": echo + text,
            # delta_text makes them.
            "logprobs": None,
            "finish_reason": buffer.finish_reason or None,
            **self.ids_of(token_ids),
        }

    def _logprobs(self, buffer: ChoiceBuffer, token_ids: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any]:
        tokens = [self.token_text(token_id) for token_id in token_ids]
        offsets = []
        for token_id in token_ids:
            # Position of the text before the token, which may only complete a character.
            offsets.append(buffer.num_characters)
            buffer.num_characters += len(buffer.detokenizer.decode_next((token_id,)))
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                # The chosen token is always included.
                {token: entry.logprob} | {self.token_text(top.token_id): top.logprob for top in entry.top}
                for token, entry in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


async def serve_completion(
    frontend: Frontend, body: CompletionRequest, request: Request, last_event_id: str | None
) -> Response:
    key, request_id = request.state.key, request.state.request_id
    count_unknown_fields(frontend, body)
    with frontend.refusals_counted(request_id):
        model = frontend.served_model(body.model or "")
        inputs = _inputs(body.prompt)
        cut = prompt_cut(frontend, body, body.max_tokens or DEFAULT_MAX_TOKENS)
        if body.suffix:
            inputs = [fill_in_middle(frontend, prompt, body) for prompt in inputs]
        check_num_choices(len(inputs), body.n)
        wanted_logprobs = WantedLogprobs.of(body)
        # With max_tokens 0 only the prompt is wanted; its worker samples one token anyway.
        has_output = body.max_tokens != 0 or not body.echo
        max_tokens = body.max_tokens if has_output else 1
        options = sampling_options(frontend, body, max_tokens, body.logprobs, wanted_logprobs.num_top)
        wanted = structured_output(body)
        resumable = is_resumable(body, options, len(inputs))
        last = last_event(last_event_id, is_resumable=resumable)
        with frontend.admission(key, len(inputs) * (body.n or 1)):
            recalled = await recall_stream(frontend, body, key, last, request.state.hold, model)
            options = replace(options, grammar=await checked_grammar(frontend, wanted, request))
            namespace = frontend.cache_namespace(key, cache_namespace(body), model)
            prompts = [await frontend.tokenize(prompt, namespace, cut) for prompt in inputs]
            shown = _inputs(body.prompt) if cut is None else [prompt.token_ids for prompt in prompts]
            texts = [await frontend.prompt_text(prompt) for prompt in shown] if body.echo else []
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        num_shown = num_tokens * (body.n or 1) * wanted_logprobs.num_forms
        frontend.check_prompt_logprobs(num_shown, wanted_logprobs.num_top, request.state.hold)
        answer_id = CompletionAnswer.answer_id(request_id)
        stream = make_stream(frontend, body, prompts[0], key, answer_id, recalled, model) if resumable else None
        check_num_prompt_tokens(frontend, prompts, body.n)
        specs = [
            RequestSpec(
                prompt,
                frontend.sampling_params(options, prompt, DEFAULT_MAX_TOKENS),
                key=key,
                client_request_id=request_id,
                session_id=body.session_id or "",
                priority=body.priority or 0,
                stop=options.stop,
                resumption=stream.resumption(from_beginning=False) if stream else None,
                kept=stream.kept if stream else None,
                client=frontend.turn_of(request.state.client, options.grammar),
                model=model,
            )
            for prompt in prompts
        ]
        generations = [output for spec in specs for output in frontend.begin(spec, body.n or 1)]
    echoes = [text for text in texts for _ in range(body.n or 1)]
    returns_ids = bool(body.return_token_ids)
    answer = CompletionAnswer(
        frontend, prompts, generations, request_id, echoes, stream, wanted_logprobs, returns_ids=returns_ids
    )
    answer.has_output = has_output
    return await answer.respond(body, request.receive)


def fill_in_middle(frontend: Frontend, prompt: PromptInput, body: CompletionRequest) -> str:
    """Returns a prompt with its suffix in the model's form. Raises InvalidRequestError."""
    form = frontend.tokenizer.fim_form
    if form is None:
        raise InvalidRequestError("this model has no tokens for filling in the middle of a text", "suffix")
    if not isinstance(prompt, str):
        raise InvalidRequestError("a suffix needs a prompt that is a text", "suffix")
    if body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("a prompt with a suffix cannot be truncated", "truncate_prompt_tokens")
    return form.prompt(prompt, body.suffix or "")


def _inputs(prompt: str | list[Any]) -> list[PromptInput]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return list(prompt)
    return [prompt]

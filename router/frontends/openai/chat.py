"""POST /v1/chat/completions."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response

from tandem.router.frontends.base import Frontend
from tandem.router.frontends.generation import Generation, Piece
from tandem.router.frontends.openai.answers import Answer, ChoiceBuffer, token_text
from tandem.router.frontends.openai.body import run_beside
from tandem.router.frontends.openai.chat_plan import ChatPlan, Reading, plan_chat, read_from, whole_structure
from tandem.router.frontends.openai.prompt_logprobs import object_text, slices_of
from tandem.router.frontends.openai.request import (
    cache_namespace,
    check_num_prompt_tokens,
    checked_grammar,
    count_unknown_fields,
)
from tandem.router.frontends.openai.resumable import ResumableStream, make_stream, recall_stream
from tandem.router.frontends.openai.streaming import to_json
from tandem.router.frontends.openai.tools_schema import ChatRequest
from tandem.router.requests.request_spec import RequestSpec, TokenizedPrompt
from tandem.router.text.chat_format import SHORT_ID_LENGTH
from tandem.router.text.output_parts import Part
from tandem.sampling_params import TokenLogprobs

CALL_ID_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class BegunChat:
    """Attributes: reading: None: the outputs are content alone."""

    plan: ChatPlan
    prompt: TokenizedPrompt
    generations: list[Generation]
    stream: ResumableStream | None
    reading: Reading | None


class ChatAnswer(Answer):
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, frontend: Frontend, chat: BegunChat, request_id: str) -> None:
        plan, stream, reading = chat.plan, chat.stream, chat.reading
        super().__init__(
            frontend,
            [chat.prompt],
            chat.generations,
            request_id,
            [plan.echo] * len(chat.generations),
            stream,
            plan.wanted_logprobs,
            returns_ids=bool(plan.body.return_token_ids),
        )
        self._role = plan.role
        self._reading = reading
        num_seen = stream.last.num_characters if stream and stream.last else 0
        self._parsers = [reading.parser(num_seen) for _ in chat.generations] if reading else []
        self._starts_over = reading is not None
        self._parts: list[list[Part]] = [[] for _ in self._parsers]
        # Reasoning tokens of each output whose reasoning is over.
        self._reasoning_ends: dict[int, int] = {}

    def opening(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        echo, buffer.echo = buffer.echo, ""
        is_forced = self._reading is not None and self._reading.calls.calls_only
        # A message of calls alone has no content.
        delta = {"role": self._role, "content": echo or (None if is_forced else "")}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def gather(self, index: int, piece: Piece) -> None:
        super().gather(index, piece)
        if self._parsers:
            # Parse piece by piece: a long text would block the loop.
            self._parts[index] += self._parts_of(index, piece.text, is_last=bool(piece.finish_reason))

    def choice(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        text, token_ids, logprobs = buffer.take_unsent()
        message: dict[str, Any] = {"role": self._role, "content": text}
        if self._parsers:
            message |= self._message(index, self._parts[index])
        if buffer.echo:
            message["content"] = buffer.echo + (message["content"] or "")
        return self._choice(index, buffer, "message", message, token_ids, logprobs)

    def delta(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        text, token_ids, logprobs = buffer.take_unsent()
        return self._choice(index, buffer, "delta", {"content": text} if text else {}, token_ids, logprobs)

    async def choice_text(self, index: int, buffer: ChoiceBuffer) -> str:
        if not buffer.logprobs:
            return to_json(self.choice(index, buffer))
        entries = list(zip(buffer.token_ids, buffer.logprobs, strict=False))
        texts = []
        for part in slices_of(buffer.logprobs):
            texts.append(to_json([self._token_logprob(*entry) for entry in entries[part]])[1:-1])
            await asyncio.sleep(0)
        buffer.logprobs = []
        return object_text(self.choice(index, buffer), {"logprobs": f'{{"content":[{",".join(texts)}]}}'})

    async def own_fields(self) -> dict[str, str]:
        fields = {}
        if self.wanted.listed is not None:
            texts, logprobs = self.prompt_texts(0)
            fields["prompt_logprobs"] = await texts.listed(logprobs)
        if self._returns_ids:
            fields["prompt_token_ids"] = await self.prompt_ids(0)
        return fields

    async def opening_fields(self) -> str:
        return f',"prompt_token_ids":{await self.prompt_ids(0)}' if self._returns_ids else ""

    async def delta_texts(self, index: int, buffer: ChoiceBuffer, num_characters: int) -> list[tuple[str, int]]:
        if not self._parsers:
            return await super().delta_texts(index, buffer, num_characters)
        text, token_ids, logprobs = buffer.take_unsent()
        parts = self._parts_of(index, text, is_last=bool(buffer.finish_reason))
        # Parts that end at the same character share an event, because an event's id counts characters.
        chunks: list[tuple[dict[str, Any], int]] = []
        for part in parts:
            if chunks and chunks[-1][1] == part.end:
                self._add(chunks[-1][0], index, part)
            else:
                chunks.append((self._add({}, index, part), part.end))
        if not chunks and (logprobs or buffer.finish_reason or (self._returns_ids and token_ids)):
            chunks.append(({}, num_characters))
        choices = []
        for place, (delta, end) in enumerate(chunks, 1):
            is_last = place == len(chunks)
            choice = self._choice(index, buffer, "delta", delta, token_ids, logprobs)
            if not is_last:
                choice["finish_reason"] = None
            choices.append((to_json(choice), end if not is_last else max(end, num_characters)))
            token_ids, logprobs = [], []
        return choices

    def _add(self, delta: dict[str, Any], index: int, part: Part) -> dict[str, Any]:
        if part.kind == "reasoning":
            delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
        elif part.kind == "content":
            delta["content"] = delta.get("content", "") + part.text
        elif part.kind == "call":
            call = {"index": part.call, "id": self._call_id(index, part.call), "type": "function"}
            delta.setdefault("tool_calls", []).append({**call, "function": {"name": part.text, "arguments": ""}})
        else:
            piece = {"index": part.call, "function": {"arguments": part.text}}
            delta.setdefault("tool_calls", []).append(piece)
        return delta

    def _message(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        calls: list[tuple[Part, list[str]]] = []
        for part in parts:
            if part.kind == "call":
                calls.append((part, []))
            elif part.kind == "arguments":
                calls[-1][1].append(part.text)
            else:
                texts[part.kind].append(part.text)
        message: dict[str, Any] = {"content": "".join(texts["content"]) or None}
        if texts["reasoning"]:
            message["reasoning_content"] = "".join(texts["reasoning"])
        if calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(index, part.call),
                    "type": "function",
                    "function": {"name": part.text, "arguments": "".join(arguments)},
                }
                for part, arguments in calls
            ]
        return message

    def _call_id(self, index: int, call: int) -> str:
        # Several requests may share a client's id.
        seed = self._generations[index].tracker.sampling.seed
        digest = digest_of_call(f"{self._id} {self._created} {seed} {call}")
        if self._frontend.tokenizer.chat_format.wants_short_ids:
            return digest[:SHORT_ID_LENGTH]
        return f"call_{digest}"

    def _finish_reason(self, index: int, buffer: ChoiceBuffer) -> str | None:
        if buffer.finish_reason == "stop" and self._reading and self._parsers[index].num_calls:
            # OpenAI says "tool_calls" only where the model had a choice.
            return "stop" if self._reading.calls.is_named else "tool_calls"
        return buffer.finish_reason or None

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._reading and self._frontend.output_format.reasoning_style is not None:
            num_tokens = sum(self._num_reasoning_tokens(index) for index in range(len(self._generations)))
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage

    def _num_reasoning_tokens(self, index: int) -> int:
        """Includes the marks."""
        if not self._parsers[index].has_reasoned:
            return 0
        return self._reasoning_ends.get(index, self._generations[index].num_output_tokens)

    def _parts_of(self, index: int, text: str, *, is_last: bool) -> list[Part]:
        parser = self._parsers[index]
        parts = parser.feed(text, is_last=is_last)
        if index not in self._reasoning_ends and parser.has_reasoned and not parser.is_reasoning:
            self._reasoning_ends[index] = end_of_reasoning(self._frontend, self._generations[index])
        return parts

    def _choice(
        self,
        index: int,
        buffer: ChoiceBuffer,
        name: str,
        message: dict[str, Any],
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
    ) -> dict[str, Any]:
        content = [self._token_logprob(token_id, entry) for token_id, entry in zip(token_ids, logprobs, strict=False)]
        return {
            "index": index,
            name: message,
            "logprobs": {"content": content} if content else None,
            "finish_reason": self._finish_reason(index, buffer),
            **self.ids_of(token_ids),
        }

    def _token_logprob(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(t.token_id, t.logprob) for t in entry.top]
        return {**self._entry(token_id, entry.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._frontend.tokenizer.token_piece(token_id)
        return {"token": token_text(piece), "logprob": logprob, "bytes": list(piece)}


async def serve_chat(frontend: Frontend, body: ChatRequest, request: Request, last_event_id: str | None) -> Response:
    count_unknown_fields(frontend, body)
    chat = await begin_chat(frontend, body, request, last_event_id)
    return await ChatAnswer(frontend, chat, request.state.request_id).respond(body, request.receive)


async def begin_chat(
    frontend: Frontend, body: ChatRequest, request: Request, last_event_id: str | None = None
) -> BegunChat:
    """Raises RequestError."""
    with frontend.refusals_counted(request.state.request_id):
        plan = await run_beside(request, plan_chat, frontend, body, last_event_id)
        chat = await _tokenize(frontend, plan, request)
        generations = frontend.begin(_spec(frontend, plan, chat, request.state), body.n or 1)
    return BegunChat(plan, chat.prompt, generations, chat.stream, chat.reading)


@dataclass(frozen=True, slots=True)
class _TokenizedChat:
    prompt: TokenizedPrompt
    reading: Reading | None
    grammar: str
    stream: ResumableStream | None


async def _tokenize(frontend: Frontend, plan: ChatPlan, request: Request) -> _TokenizedChat:
    body, state = plan.body, request.state
    key = state.key
    with frontend.admission(key, body.n or 1):
        recalled = await recall_stream(frontend, body, key, plan.last_event, state.hold, plan.model)
        namespace = frontend.cache_namespace(key, cache_namespace(body), plan.model)
        prompt = await frontend.tokenize(plan.prompt, namespace, plan.cut)
        reading = read_from(frontend.output_format, plan, prompt)
        grammar = await checked_grammar(frontend, whole_structure(plan.calls.structure, reading), request)
    frontend.check_prompt_logprobs(len(prompt.token_ids), plan.wanted_logprobs.num_top, state.hold)
    stream = None
    if plan.is_resumable:
        answer_id = ChatAnswer.answer_id(state.request_id)
        stream = make_stream(frontend, body, prompt, key, answer_id, recalled, plan.model)
    check_num_prompt_tokens(frontend, [prompt], body.n)
    return _TokenizedChat(prompt, reading, grammar, stream)


def _spec(frontend: Frontend, plan: ChatPlan, chat: _TokenizedChat, state: State) -> RequestSpec:
    body, stream, reading = plan.body, chat.stream, chat.reading
    options = replace(plan.options, grammar=chat.grammar)
    return RequestSpec(
        chat.prompt,
        # Without a limit, an answer may fill the model's length.
        frontend.sampling_params(options, chat.prompt, frontend.sampling_defaults.max_tokens),
        key=state.key,
        client_request_id=state.request_id,
        session_id=body.session_id or "",
        priority=body.priority or 0,
        stop=options.stop,
        marks=reading.marks if reading else None,
        # A parser needs the text from the beginning.
        resumption=stream.resumption(from_beginning=reading is not None) if stream else None,
        kept=stream.kept if stream else None,
        client=frontend.turn_of(state.client, chat.grammar),
        model=plan.model,
    )


async def count_prompt_tokens(frontend: Frontend, body: ChatRequest, request: Request) -> int:
    with frontend.refusals_counted(request.state.request_id):
        plan = await run_beside(request, plan_chat, frontend, body)
        with frontend.admission(request.state.key):
            prompt = await frontend.tokenize(plan.prompt, cut=plan.cut)
    return len(prompt.token_ids)


def digest_of_call(named: str) -> str:
    """Args: named: unique description of the call."""
    return hashlib.blake2b(named.encode(), digest_size=16).hexdigest()[:CALL_ID_CHARACTERS]


def end_of_reasoning(frontend: Frontend, generation: Generation) -> int:
    token_ids, closing_id = generation.tracker.output_ids, frontend.output_format.closing_id
    if closing_id is not None and closing_id in token_ids:
        return token_ids.index(closing_id) + 1
    # Other tokens may have spelled the mark.
    return generation.num_output_tokens

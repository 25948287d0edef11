"""A chat with one output, for APIs with their own requests and answers.

Such an API translates its request with `translated`, and its `AnswerForm` translates the output's parts.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive

from tandem.router.errors import InvalidRequestError, RequestError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.cached_tokens import cached_details
from tandem.router.frontends.openai.chat import BegunChat, digest_of_call, end_of_reasoning
from tandem.router.frontends.openai.errors import invalid_field, json_response
from tandem.router.frontends.openai.schema import SamplingFields
from tandem.router.frontends.openai.streaming import (
    EventStream,
    begin_stream,
    pieces_of,
    to_json,
    unless_client_leaves,
)
from tandem.router.frontends.openai.text_logprobs import TextLogprobs
from tandem.router.frontends.openai.tools_schema import ChatRequest
from tandem.router.text.output_parts import Part, PartList

SAMPLING_FIELDS = tuple(SamplingFields.model_fields)

_TEXT = {"type": "string"}
_EVENT = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}, "required": ["event", "data"]}
STREAMED = {"text/event-stream": {"itemSchema": _EVENT}}

# An event's name and content.
NamedEvent = tuple[str, dict[str, Any]]


def translated(content: Mapping[str, Any], sampling: SamplingFields, names: Mapping[str, str]) -> ChatRequest:
    """Raises InvalidRequestError. Args: names: the client's names of the chat's fields, where they differ."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(sampling, name)) is not None}
    try:
        return ChatRequest.model_validate({**content, **given})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        # The position inside the field may differ from the client's.
        raise invalid_field(first, [names.get(field, field)] if field else []) from error


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        if (name := names.get(error.param)) is not None:
            message = re.sub(rf"\b{error.param}\b", lambda _: name, str(error), count=1)
            raise type(error)(message, name) from error
        raise


class OneOutput:
    def __init__(self, frontend: Frontend, chat: BegunChat, answer_id: str) -> None:
        self._frontend = frontend
        self._generations = chat.generations
        (self._generation,) = chat.generations
        self._answer_id = answer_id
        self._parser = chat.reading.parser(0) if chat.reading else None
        self._reasoning_end: int | None = None
        self._num_characters = 0
        self._logprobs: TextLogprobs | None = None
        if self.sampling.num_logprobs is not None:
            self._logprobs = TextLogprobs(frontend.tokenizer, self._generation.tracker.spec.marks)
        self.num_prompt_tokens = len(chat.prompt.token_ids)
        self.finish_reason = ""

    async def parts(self) -> AsyncGenerator[Sequence[Part]]:
        """The first item, perhaps an empty list, comes with the first token. Raises as pieces_of."""
        async with aclosing(pieces_of(self._generations)) as pieces:
            async for _, piece in pieces:
                self.finish_reason = piece.finish_reason
                if self._logprobs is not None:
                    self._logprobs.feed(piece)
                if self._parser is not None:
                    parts = self._parser.feed(piece.text, is_last=bool(piece.finish_reason))
                    if self._reasoning_end is None and self._parser.has_reasoned and not self._parser.is_reasoning:
                        self._reasoning_end = end_of_reasoning(self._frontend, self._generation)
                    yield parts
                else:
                    self._num_characters += len(piece.text)
                    yield [Part("content", piece.text, self._num_characters)] if piece.text else []

    @property
    def num_cached_tokens(self) -> int:
        return self._generation.tracker.prompt_cached_len or 0

    @property
    def cached_details(self) -> dict[str, int]:
        return cached_details([self._generation.tracker])

    @property
    def num_newly_cached_tokens(self) -> int:
        """Prompt tokens that this request added to the prefill worker's cache, which holds whole pages."""
        page_size = self._generation.page_size()
        if not page_size:
            return 0
        return max(0, self.num_prompt_tokens // page_size * page_size - self.num_cached_tokens)

    @property
    def num_output_tokens(self) -> int:
        return self._generation.num_output_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Includes the marks."""
        if self._parser is None or not self._parser.has_reasoned:
            return 0
        return self.num_output_tokens if self._reasoning_end is None else self._reasoning_end

    @property
    def stop_string(self) -> str | None:
        return self._generation.stop_string

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    @property
    def sampling(self) -> Any:
        return self._generation.tracker.sampling

    def take_logprobs(self, part: Part) -> list[dict[str, Any]]:
        """Returns the log probabilities of a part's tokens, if the request asks for any. Call it with each part once,
        in order."""
        return [] if self._logprobs is None else self._logprobs.take(part)

    def digest_of(self, call: int) -> str:
        return digest_of_call(f"{self._answer_id} {self.sampling.seed} {call}")


class AnswerForm(ABC):
    """An API's form of one answer. The whole answer is made from the events."""

    @abstractmethod
    def begin(self) -> list[NamedEvent]:
        """Called at the first token."""

    @abstractmethod
    def add(self, part: Part) -> list[NamedEvent]: ...

    @abstractmethod
    def end(self) -> list[NamedEvent]:
        """Called at the end."""

    @abstractmethod
    def fail(self, error: RequestError) -> list[NamedEvent]:
        """Called if the output fails after its first token."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Called after `end`."""

    @abstractmethod
    async def finish(self) -> None:
        """Called after `end`, before its events are sent. Raises RequestError: the answer counts as failed."""


class NamedEventStream(EventStream):
    """Events with names, and without [DONE]."""

    done = b""

    def encode(self, event_id: str, content: str) -> bytes:
        """Args: event_id: the event's name."""
        return f"event: {event_id}\ndata: {content}\n\n".encode()


async def respond(
    output: OneOutput, form: AnswerForm, receive: Receive, stream: type[NamedEventStream] | None
) -> Response:
    """Raises RequestError, ClientGoneError before anything is sent. Args: stream: None: an answer in one piece."""
    if stream is None:
        await unless_client_leaves(receive, _collect(output, form))
        return json_response(form.whole())
    return await begin_stream(_events(output, form), receive, stream)


async def compute(output: OneOutput, form: AnswerForm) -> None:
    """Has the output computed for nobody who waits. Failures and cancellations are for the caller."""
    has_begun = False
    async with aclosing(output.parts()) as coming:
        async for parts in coming:
            if not has_begun:
                has_begun = True
                form.begin()
            for part in parts:
                form.add(part)
    form.end()
    await form.finish()


async def _collect(output: OneOutput, form: AnswerForm) -> None:
    found = PartList()
    async with aclosing(output.parts()) as coming:
        async for parts in coming:
            for part in parts:
                found.append(part.kind, part.text, part.end, part.call)
    form.begin()
    for part in found.take():
        form.add(part)
    form.end()
    await form.finish()


async def _events(output: OneOutput, form: AnswerForm) -> AsyncGenerator[tuple[str, str]]:
    has_begun = False
    try:
        async with aclosing(output.parts()) as coming:
            async for parts in coming:
                if not has_begun:
                    has_begun = True
                    for name, content in form.begin():
                        yield name, to_json(content)
                for part in parts:
                    for name, content in form.add(part):
                        yield name, to_json(content)
        last = form.end()
        await form.finish()
    except RequestError as error:
        if not has_begun:
            raise
        last = form.fail(error)
    for name, content in last:
        yield name, to_json(content)

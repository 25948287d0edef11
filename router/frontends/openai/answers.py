"""The JSON of an answer, whole or in chunks. Both come from the same pieces, so their texts agree."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from tandem.router.frontends.base import Frontend
from tandem.router.frontends.generation import Generation, Piece
from tandem.router.frontends.openai.cached_tokens import cached_details
from tandem.router.frontends.openai.errors import json_text_response
from tandem.router.frontends.openai.long_lists import list_text
from tandem.router.frontends.openai.prompt_logprobs import PromptTexts, object_text
from tandem.router.frontends.openai.request import Body, WantedLogprobs
from tandem.router.frontends.openai.resumable import ResumableStream
from tandem.router.frontends.openai.schema import StreamOptions
from tandem.router.frontends.openai.streaming import Event, begin_stream, pieces_of, to_json, unless_client_leaves
from tandem.router.requests.prompt_logprobs import PromptLogprobs
from tandem.router.requests.request_spec import TokenizedPrompt
from tandem.router.text.detokenizer import IncrementalDetokenizer
from tandem.sampling_params import TokenLogprobs

# Characters of JSON: events with short texts are padded to the same length.
OBFUSCATED_LENGTH = 64


@dataclass(eq=False, slots=True)
class ChoiceBuffer:
    """Output of one choice that is not in the answer yet.

    Attributes:
        detokenizer: for the tokens in lists of log probabilities.
        num_characters: length of the echo and the listed tokens' text.
    """

    detokenizer: IncrementalDetokenizer
    echo: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_characters: int = 0
    finish_reason: str = ""
    is_begun: bool = False

    def append_piece(self, piece: Piece) -> None:
        self.finish_reason = piece.finish_reason
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs

    def take_unsent(self) -> tuple[str, list[int], list[TokenLogprobs]]:
        taken = self.text, self.token_ids, self.logprobs
        self.text, self.token_ids, self.logprobs = "", [], []
        return taken


class Answer(ABC):
    """The answer to one HTTP request: all outputs of its first prompt, then the next one's."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    # Parsers need a resumed output's text from its beginning.
    _starts_over = False

    def __init__(
        self,
        frontend: Frontend,
        prompts: Sequence[TokenizedPrompt],
        generations: Sequence[Generation],
        request_id: str,
        echoes: Sequence[str] = (),
        stream: ResumableStream | None = None,
        wanted: WantedLogprobs | None = None,
        *,
        returns_ids: bool = False,
    ) -> None:
        """
        Args:
            generations: the same number for each prompt.
            echoes: one per generation, or none.
            returns_ids: whether the client wants the prompts' and outputs' token ids.
        """
        self._frontend = frontend
        self._prompts = prompts
        self._generations = generations
        self._stream = stream
        self._returns_ids = returns_ids
        self._num_choices = len(generations) // len(prompts)
        self.wanted = wanted or WantedLogprobs(None, None)
        self._prompt_texts: dict[int, PromptTexts] = {}
        # The prompt's text is in the first event, which a resuming client has.
        texts = [""] * len(generations) if not echoes or (stream and stream.last) else echoes
        self._buffers = [ChoiceBuffer(IncrementalDetokenizer(frontend.tokenizer), text) for text in texts]
        self._id = stream.kept.answer_id if stream else self.answer_id(request_id)
        self._created = stream.kept.created if stream else int(time.time())

    @classmethod
    def answer_id(cls, request_id: str) -> str:
        return f"{cls.id_prefix}-{request_id}"

    @abstractmethod
    def choice(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        """Returns a whole choice."""

    @abstractmethod
    def delta(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        """Returns a chunk's choice."""

    async def choice_text(self, index: int, buffer: ChoiceBuffer) -> str:
        return to_json(self.choice(index, buffer))

    async def delta_text(self, index: int, buffer: ChoiceBuffer) -> str:
        return to_json(self.delta(index, buffer))

    async def delta_texts(self, index: int, buffer: ChoiceBuffer, num_characters: int) -> list[tuple[str, int]]:
        """Returns the next chunks' choices as JSON, each with the length of the client's text after it."""
        return [(await self.delta_text(index, buffer), num_characters)]

    async def own_fields(self) -> dict[str, str]:
        return {}

    async def opening_fields(self) -> str:
        """Returns JSON for the chunks of openings, beside their choices."""
        return ""

    def opening(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any] | None:
        return None

    async def respond(self, body: Body, receive: Receive) -> Response:
        """Raises RequestError, ClientGoneError before anything is sent."""
        if not body.stream:
            return json_text_response(await unless_client_leaves(receive, self._collect()))
        return await begin_stream(self._events(body.stream_options or StreamOptions()), receive)

    async def _collect(self) -> str:
        async with aclosing(pieces_of(self._generations)) as pieces:
            async for index, piece in pieces:
                self.gather(index, self.shown(piece))
        choices = [await self.choice_text(i, buffer) for i, buffer in enumerate(self._buffers)]
        fields = {**self._head(self.object_name), "choices": None, "usage": self._usage()}
        return object_text(fields, {"choices": f"[{','.join(choices)}]", **await self.own_fields()})

    def gather(self, index: int, piece: Piece) -> None:
        self._buffers[index].append_piece(piece)

    def shown(self, piece: Piece) -> Piece:
        return piece

    def prompt_texts(self, index: int) -> tuple[PromptTexts, PromptLogprobs]:
        """Each prompt's first output carries its log probabilities."""
        number = index // self._num_choices
        logprobs = self._generations[number * self._num_choices].tracker.prompt_logprobs
        assert logprobs is not None
        if number not in self._prompt_texts:
            prompt = self._prompts[number]
            self._prompt_texts[number] = PromptTexts(self._frontend.tokenizer, self.token_text, prompt, self.wanted)
        return self._prompt_texts[number], logprobs

    async def _events(self, options: StreamOptions) -> AsyncGenerator[Event]:
        head = self._head(self.chunk_object_name)
        continuous = options.include_usage and options.continuous_usage_stats
        if options.include_usage and not continuous:
            head["usage"] = None
        beginning = to_json(head).removesuffix("}")
        opening_fields = await self.opening_fields()

        def chunk(choice: str, more: str = "") -> str:
            ending = more + (f',"usage":{to_json(self._usage())}' if continuous else "")
            content = f'{beginning},"choices":[{choice}]{ending}}}'
            return obfuscated(content) if options.include_obfuscation else content

        last = self._stream.last if self._stream else None
        num_characters = last.num_characters if last and not self._starts_over else 0
        num_closing = last.num_closing if last else 0
        # A client that has any event has the opening.
        opened = {0} if last else set()
        async with aclosing(pieces_of(self._generations)) as pieces:
            async for index, piece in pieces:
                buffer = self._buffers[index]
                buffer.append_piece(self.shown(piece))
                if index not in opened:
                    opened.add(index)
                    if (opening := self.opening(index, buffer)) is not None:
                        yield self._event_id(0), chunk(to_json(opening), opening_fields)
                has_ids = self._returns_ids and buffer.token_ids
                if buffer.text or buffer.logprobs or buffer.finish_reason or has_ids:
                    num_characters += len(buffer.text)
                    # The parser needs the whole text, even the client's part.
                    texts = await self.delta_texts(index, buffer, num_characters)
                    if buffer.finish_reason and num_closing:
                        continue
                    for place, (text, end) in enumerate(texts, 1):
                        is_closing = bool(buffer.finish_reason) and place == len(texts)
                        yield self._event_id(end, 1 if is_closing else 0), chunk(text)
        if options.include_usage and num_closing < 2:
            yield self._event_id(num_characters, 2), to_json({**head, "choices": [], "usage": self._usage()})

    def _event_id(self, num_characters: int, num_closing: int = 0) -> str:
        if self._stream is None:
            return ""
        return self._stream.event_id(self._generations[0].num_output_tokens, num_characters, num_closing)

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._generations[0].tracker.spec.model.name,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_output_tokens = self.num_output_tokens()
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": cached_details(g.tracker for g in self._generations[:: self._num_choices]),
        }

    def num_output_tokens(self) -> int:
        return sum(generation.num_output_tokens for generation in self._generations)

    def ids_of(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Returns a choice's field with these output tokens, if the client wants it."""
        return {"token_ids": token_ids} if self._returns_ids else {}

    async def prompt_ids(self, index: int) -> str:
        """Returns the token ids of an output's prompt as JSON."""
        return await list_text(self._prompts[index // self._num_choices].token_ids)

    def token_text(self, token_id: int) -> str:
        return token_text(self._frontend.tokenizer.token_piece(token_id))


def obfuscated(content: str) -> str:
    """The padded length of an encrypted event tells less about its text."""
    num_missing = -(len(content) + len(',"obfuscation":""')) % OBFUSCATED_LENGTH
    noise = secrets.token_urlsafe(OBFUSCATED_LENGTH)[:num_missing]
    return f'{content[:-1]},"obfuscation":"{noise}"}}'


def token_text(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

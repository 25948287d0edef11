"""Streams that a client can resume after its connection breaks or its router dies.

An event's id holds the stream's secret name and the amount of output so far. To resume, the client repeats its request
with its last event's id. Workers keep the tokens and the router's state under a digest of name and API key.

Recorded output keeps the old name; output of the new request has a new one.
"""

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.router.adapters.names import ServedModel
from tandem.router.errors import InvalidRequestError, LostStreamError, UnavailableError, UnknownStreamError
from tandem.router.frontends.access import key_digest
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.openai.schema import ChatCompletionRequest, CompletionRequest
from tandem.router.frontends.sampling import SamplingOptions
from tandem.router.requests.request_spec import TokenizedPrompt
from tandem.router.resumption import DIGEST_BYTES, KeptStream, ResumeState, Resumption, prompt_digest

HEADER = "Last-Event-ID"
UNKNOWN_STREAM = "nothing is known of this stream: begin again, without the header"
ANOTHER_REQUEST = "the stream belongs to another request: send the same body again"
# Memory of a token in a list.
TOKEN_BYTES = 32
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]{22})\.([1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})(?:\.([12]))?")
# The prompt is compared as tokens.
_PROMPT_FIELDS = {"prompt", "messages"}


@dataclass(frozen=True, slots=True)
class EventId:
    """
    Attributes:
        num_tokens: tokens whose text had come by this event, sent or waiting.
        num_characters: length of the text sent by this event, in Unicode code points.
        num_closing: closing events: 1 with the finish reason, 2 with the usage.
    """

    name: str
    num_tokens: int
    num_characters: int
    num_closing: int = 0

    @classmethod
    def parse(cls, text: str) -> "EventId":
        if (match := _EVENT_ID.fullmatch(text)) is None:
            raise InvalidRequestError(f"{HEADER} is not an event id of this server", HEADER)
        name, *numbers = match.groups(default="0")
        return cls(name, *map(int, numbers))


@dataclass(frozen=True, slots=True)
class RecalledStream:
    """A stream to resume after its event `last`."""

    last: EventId
    state: ResumeState
    resumption: Resumption


class ResumableStream:
    def __init__(self, kept: KeptStream, name: str, recalled: RecalledStream | None) -> None:
        self.kept = kept
        self.recalled = recalled
        self._name = name
        # Tokens in the old record; the new one may never have them.
        self._num_recalled = len(recalled.resumption.token_ids) if recalled else 0

    @property
    def last(self) -> EventId | None:
        return self.recalled.last if self.recalled else None

    def resumption(self, *, from_beginning: bool) -> Resumption | None:
        """Args: from_beginning: whether the client's part of the text is needed too."""
        resumption = self.recalled.resumption if self.recalled else None
        return replace(resumption, num_characters=0) if resumption and from_beginning else resumption

    def event_id(self, num_tokens: int, num_characters: int, num_closing: int) -> str:
        if num_tokens <= self._num_recalled:
            assert self.recalled is not None
            name = self.recalled.last.name
        else:
            name = self._name
        return f"{name}.{num_tokens}.{num_characters}" + (f".{num_closing}" if num_closing else "")


def is_resumable(body: CompletionRequest | ChatCompletionRequest, options: SamplingOptions, num_prompts: int) -> bool:
    # An event with text may not have all of its tokens, so a client could not tell the place.
    has_tokens = options.num_logprobs is not None or options.num_prompt_logprobs is not None or body.return_token_ids
    return bool(body.stream) and num_prompts * (body.n or 1) == 1 and not has_tokens


def last_event(header: str | None, *, is_resumable: bool) -> EventId | None:
    """Raises InvalidRequestError."""
    if not header:
        return None
    if not is_resumable:
        raise InvalidRequestError(
            "only a stream of one output without log probabilities and token ids can be resumed: begin again, without "
            "the header",
            HEADER,
        )
    return EventId.parse(header)


async def recall_stream(
    frontend: Frontend,
    body: CompletionRequest | ChatCompletionRequest,
    key: str,
    last: EventId | None,
    hold: Callable[[int], None],
    model: ServedModel,
) -> RecalledStream | None:
    """Asks the workers for a stream, before the prompt is tokenized.

    Raises:
        InvalidRequestError: it belongs to a request with another body, or to another content of the adapter.
        UnknownStreamError: no worker knows it, or it belongs to another key.
        LostStreamError: less is left than the client has.
        UnavailableError: some workers have not answered, and the others know too little.
        OverloadedError: too many lookups, or memory is short.
    """
    if last is None:
        return None
    if not frontend.knows_stream_name(last.name, key):
        raise UnknownStreamError(UNKNOWN_STREAM, HEADER)
    name = record_id(last.name, key)
    found = await frontend.router.recalls.recall(name)
    record = found.record
    if record is None or len(record.token_ids) < last.num_tokens:
        if not found.is_certain:
            raise UnavailableError("some workers have not answered for this stream; try again")
        if record is None:
            raise UnknownStreamError(UNKNOWN_STREAM, HEADER)
        raise LostStreamError("the end of this stream is lost: begin again, without the header", HEADER)
    # The body is small, and the record may be a thousand times larger.
    hold(TOKEN_BYTES * len(record.token_ids))
    # Only workers write records. Its state names the record, so the tokens are those of this stream.
    state = frontend.open_resume_token(record.resume_token, key)
    if state.stream_id != bytes.fromhex(name):
        raise UnknownStreamError("the record of this stream is another's: begin again, without the header", HEADER)
    if state.request_digest != _body_digest(body, model):
        raise InvalidRequestError(ANOTHER_REQUEST, HEADER)
    return RecalledStream(last, state, Resumption(state, record.token_ids, last.num_characters, last.num_tokens))


def make_stream(
    frontend: Frontend,
    body: CompletionRequest | ChatCompletionRequest,
    prompt: TokenizedPrompt,
    key: str,
    answer_id: str,
    recalled: RecalledStream | None,
    model: ServedModel,
) -> ResumableStream:
    """Raises InvalidRequestError: this is not the recalled request."""
    created = int(time.time())
    if recalled is not None:
        state = recalled.state
        if state.prompt_digest != prompt_digest(prompt.token_ids):
            raise InvalidRequestError(ANOTHER_REQUEST, HEADER)
        answer_id, created = state.answer_id, state.created
    name = frontend.new_stream_name(key)
    return ResumableStream(
        KeptStream(record_id(name, key), _body_digest(body, model), answer_id, created), name, recalled
    )


def _body_digest(body: CompletionRequest | ChatCompletionRequest, model: ServedModel) -> bytes:
    text = body.model_dump_json(exclude=_PROMPT_FIELDS) + model.content_hash
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def record_id(name: str, key: str) -> str:
    """Returns the workers' name of a stream, which depends on the key."""
    return hashlib.blake2b(f"{name} {key_digest(key)}".encode(), digest_size=16).hexdigest()

"""How a server is spoken with. One client belongs to one process and its asyncio loop."""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from tandem.bench.records import ErrorKind, RequestRecord
from tandem.bench.workloads.base import PromptPart, Role

Api = Literal["completions", "chat"]
APIS: tuple[Api, ...] = ("completions", "chat")
# Seconds from the run's start.
Clock = Callable[[], float]


class EndpointError(Exception):
    """The server cannot be measured: nobody answers, or it does not let the client in."""


class RequestError(Exception):
    """A request has no whole answer."""

    def __init__(self, kind: ErrorKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: ErrorKind = kind


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """Attributes: model: which requests name; detail: what the server says of itself."""

    model: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What later turns of the session repeat. Attributes: token_ids: None: the server does not tell them."""

    token_ids: "array[int] | None"
    text: str

    @property
    def digest(self) -> str:
        whole = self.text.encode() if self.token_ids is None else self.token_ids.tobytes()
        return hashlib.sha256(whole).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """
    Attributes:
        url: grpc://HOST:PORT, or http://HOST[:PORT]/v1, or https.
        model: which requests name; empty: the first that the server has.
        headers: sent with every call besides what the client sends itself.
        tls: for grpc: over TLS. The files below imply it.
        ignore_eos: outputs have the wanted length, whatever the model says.
        continuous_usage: whether an OpenAI-compatible server is asked to count tokens with each chunk.
        timeout_s: of a whole request, in seconds.
        connect_timeout_s: of a connection, and of the question what the server is, in seconds.
    """

    url: str
    api: Api = "completions"
    model: str = ""
    api_key: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    ignore_eos: bool = True
    continuous_usage: bool = False
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0


class BenchClient(ABC):
    """Use `open`, then `prepare` and `send` for each request, then `close`."""

    @abstractmethod
    async def open(self) -> ServerDescription:
        """Asks the server what it is. Raises EndpointError."""

    @abstractmethod
    def prepare(self, parts: Sequence[PromptPart], num_output_tokens: int) -> Any:
        """A request as `send` takes it, so that what takes time is done before it is due."""

    @abstractmethod
    async def send(self, prepared: Any, record: RequestRecord, clock: Clock) -> Answer:
        """Sends a request and reads its answer to the end. Notes in the record when it left, its chunks with their
        times as they come, and what the server has counted.

        Raises:
            RequestError: there is no whole answer. What came of it is in the record.
        """

    @abstractmethod
    async def close(self) -> None: ...


def messages(parts: Sequence[PromptPart]) -> list[tuple[Role, str]]:
    """Of a chat: roles and texts. Parts of one role that follow each other are one message, as chats have them: many
    chat templates refuse two messages of a user in a row."""
    return [(role, " ".join(part.text for part in group)) for role, group in groupby(parts, lambda part: part.role)]


def count_chunks(record: RequestRecord, usage_tokens: int | None, lengths: Sequence[int]) -> None:
    """Settles how many tokens each chunk has, for servers that do not say so with each.

    Args:
        usage_tokens: of the whole output, as the server counted; None: it did not.
        lengths: characters of each chunk.
    """
    if usage_tokens is None:
        record.counted_by = "chunks"
        record.counts = array("I", [1] * len(lengths))
        record.num_output_tokens = len(lengths)
        return
    record.num_output_tokens = usage_tokens
    if usage_tokens == len(lengths):
        record.counted_by = "usage"
        record.counts = array("I", [1] * len(lengths))
        return
    record.counted_by = "characters"
    total, so_far, given = sum(lengths), 0, 0
    for length in lengths:
        so_far += length
        share = round(usage_tokens * so_far / total) if total else 0
        record.counts.append(share - given)
        given = share

"""The interface of clients. A client belongs to one process and its asyncio loop."""

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
    """The server cannot be measured: it is unreachable or refuses the client."""


class RequestError(Exception):
    """A request has no whole answer."""

    def __init__(self, kind: ErrorKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: ErrorKind = kind


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """Attributes: model: name for requests; detail: the server's own description."""

    model: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The part of an answer that later turns repeat. Attributes: token_ids: None: unknown."""

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
        model: name for requests; empty: the server's first model.
        headers: additional headers of every call.
        tls: for grpc. The files below imply it.
        ignore_eos: whether outputs have the wanted length regardless of the model.
        continuous_usage: whether to ask an OpenAI-compatible server for counts with each chunk.
        timeout_s: of a whole request.
        connect_timeout_s: of a connection, and of the first question to the server.
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
        """Returns a request for `send`, so that slow work is done before it is due."""

    @abstractmethod
    async def send(self, prepared: Any, record: RequestRecord, clock: Clock) -> Answer:
        """Sends a request and reads its answer to the end, recording times and counts.

        Raises:
            RequestError: the answer is not whole; the record has its part.
        """

    @abstractmethod
    async def close(self) -> None: ...


def messages(parts: Sequence[PromptPart]) -> list[tuple[Role, str]]:
    """Returns a chat's roles and texts. Merges consecutive parts of one role: many chat templates refuse two user
    messages in a row.
    """
    return [(role, " ".join(part.text for part in group)) for role, group in groupby(parts, lambda part: part.role)]


def count_chunks(record: RequestRecord, usage_tokens: int | None, lengths: Sequence[int]) -> None:
    """Settles the tokens of each chunk for servers that do not report them.

    Args:
        usage_tokens: the server's count of the whole output; None: not reported.
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

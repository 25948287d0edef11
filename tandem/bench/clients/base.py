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
    """The server is unreachable or refuses the client."""


class RequestError(Exception):
    def __init__(self, kind: ErrorKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: ErrorKind = kind


@dataclass(frozen=True, slots=True)
class ServerDescription:
    model: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
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
        url: grpc://HOST:PORT, or http(s)://HOST[:PORT]/v1.
        model: empty: the server's first model.
        tls: for grpc; implied by the files below.
        continuous_usage: ask an OpenAI-compatible server for token counts with each chunk.
        connect_timeout_s: also of the first question to the server.
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
        """Raises EndpointError."""

    @abstractmethod
    def prepare(self, parts: Sequence[PromptPart], num_output_tokens: int) -> Any:
        """Encode a request for `send`, before it is due."""

    @abstractmethod
    async def send(self, prepared: Any, record: RequestRecord, clock: Clock) -> Answer:
        """Send a request and read its whole answer into the record. Raises RequestError if it is not whole."""

    @abstractmethod
    async def close(self) -> None: ...


def messages(parts: Sequence[PromptPart]) -> list[tuple[Role, str]]:
    """Return roles and texts with equal neighbors merged: many chat templates refuse two user messages in a row."""
    return [(role, " ".join(part.text for part in group)) for role, group in groupby(parts, lambda part: part.role)]


def count_chunks(record: RequestRecord, usage_tokens: int | None, lengths: Sequence[int]) -> None:
    """Estimate the tokens per chunk if the server does not report them.

    Args:
        usage_tokens: the server's count for the whole output, or None.
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

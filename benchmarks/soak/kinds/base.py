"""The interface of a kind of request whose answers can be checked."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from benchmarks.soak.case import Case
from tandem.client import TandemClient


@dataclass(frozen=True)
class Clients:
    """Attributes: http: "host:port"; model: name of the served model."""

    grpc: TandemClient
    openai: openai.OpenAI
    http: str
    model: str


class Kind(ABC):
    """Requests of one kind, numbered from 0. Their answers depend on the number alone.

    `first` and `again` raise PassingError if the client had to send the request again; any other error is a failure.
    """

    name: str

    def __init__(self, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> None:
        """Args: prompts: token ids; texts: the same prompts as text."""
        self.prompts = prompts
        self.texts = texts

    @abstractmethod
    def first(self, clients: Clients, number: int) -> Any:
        """Return the whole answer, while nothing disturbs the cluster. Raises ValueError: it is no right answer."""

    def again(self, clients: Clients, number: int, rng: random.Random) -> Any:
        """Return the answer, or a part of it."""
        return self.first(clients, number)

    def is_right(self, first: Any, again: Any) -> bool:
        """Return whether `again` has the answer of `first`."""
        return bool(first == again)

    def cases(self, number: int, answer: Any, *, is_first: bool) -> list[Case]:
        """Return what the model must confirm of an answer that differs from the first one, or is the first one.

        [] if it cannot: then every difference is wrong.
        """
        return []

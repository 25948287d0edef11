"""How many prompt tokens one forward computes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple


class PromptRest(NamedTuple):
    """What is left of a prompt. Attributes: num_cached: tokens before it; num_left: those of it."""

    num_cached: int
    num_left: int


class PromptBudget(ABC):
    @abstractmethod
    def num_tokens(self, first: Callable[[], PromptRest]) -> int:
        """Tokens that the next forward computes at most, at least 1. Args: first: of the prompt that is computed first,
        which may have to be looked for."""


class WholeChunks(PromptBudget):
    """Always the same."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def num_tokens(self, first: Callable[[], PromptRest]) -> int:
        return self._chunk_size

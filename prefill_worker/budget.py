"""Number of prompt tokens in a forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple


class PromptRest(NamedTuple):
    num_cached: int
    num_left: int


class PromptBudget(ABC):
    @abstractmethod
    def num_tokens(self, first: Callable[[], PromptRest]) -> int:
        """Returns the token limit of the next forward pass, at least 1.

        Args:
            first: returns the rest of the first prompt; may need a lookup.
        """


class WholeChunks(PromptBudget):
    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def num_tokens(self, first: Callable[[], PromptRest]) -> int:
        return self._chunk_size

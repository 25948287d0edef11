"""How many prompt tokens one forward computes."""

from abc import ABC, abstractmethod
from collections.abc import Callable


class PromptBudget(ABC):
    @abstractmethod
    def num_tokens(self, num_cached: Callable[[], int]) -> int:
        """Tokens that the next forward computes at most, at least 1. Args: num_cached: says how many tokens are before
        the first one, which may have to be looked for."""


class WholeChunks(PromptBudget):
    """Always the same."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def num_tokens(self, num_cached: Callable[[], int]) -> int:
        return self._chunk_size

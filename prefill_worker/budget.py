"""How many prompt tokens one forward computes."""

from abc import ABC, abstractmethod


class PromptBudget(ABC):
    @abstractmethod
    def num_tokens(self, num_cached: int) -> int:
        """Tokens that the next forward computes at most, at least 1. Args: num_cached: tokens before the first one."""


class WholeChunks(PromptBudget):
    """Always the same."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def num_tokens(self, num_cached: int) -> int:
        return self._chunk_size

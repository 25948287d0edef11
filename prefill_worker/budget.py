"""Number of prompt tokens in a forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple


class PromptRest(NamedTuple):
    num_cached: int
    num_left: int


class PromptBudget(ABC):
    @abstractmethod
    def fit(self, prompts: Iterator[PromptRest]) -> list[int]:
        """Returns the tokens of each taken prompt in the next forward pass. The first has at least 1, later ones may
        have 0.

        Args:
            prompts: prompts in their order in the pass. Taking one may lock its pages: take none without room for it.
        """


class WholeChunks(PromptBudget):
    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def fit(self, prompts: Iterator[PromptRest]) -> list[int]:
        return fill(prompts, self._chunk_size)


def fill(prompts: Iterator[PromptRest], num_tokens: int) -> list[int]:
    """Returns the tokens of each taken prompt, `num_tokens` in all if there are enough."""
    sizes: list[int] = []
    for prompt in prompts:
        sizes.append(min(prompt.num_left, num_tokens))
        num_tokens -= sizes[-1]
        if not num_tokens:
            break
    return sizes

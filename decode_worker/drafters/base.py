from abc import ABC, abstractmethod
from collections.abc import Sequence


class Drafter(ABC):
    """Proposes the next tokens of one request. A wrong proposal costs time, never a token.

    Attributes:
        source: name of the last proposal's source in the metrics; "" for the drafter's own name.
    """

    source: str = ""

    @abstractmethod
    def propose(self, token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
        """Returns at most `max_tokens` tokens that may follow. Called before a step, in bounded time and memory.

        Args:
            token_ids: prompt and output; longer than at the last call, with the same beginning.
        """

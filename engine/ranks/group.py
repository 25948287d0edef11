"""Agreement between the ranks of a worker while they start."""

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from tandem.config import WORKER_SILENCE_LIMIT_S
from tandem.engine.ranks.config import SINGLE_RANK, RankConfig
from tandem.engine.ranks.progress import Progress

T = TypeVar("T")


class RankGroup(ABC):
    """Exchanges values between the ranks of a worker while they start.

    All ranks call the same methods in the same order. Values are picklable and small.

    Attributes:
        progress: in memory that all ranks map; None if they are threads.
        wait_timeout_s: longest wait for another rank in a forward pass, in seconds.

    Raises:
        ConnectionError: from any method, another rank has ended.
        TimeoutError: from any method, another rank has not called it in time.
    """

    ranks: RankConfig
    progress: Progress | None = None
    wait_timeout_s: float = WORKER_SILENCE_LIMIT_S

    @abstractmethod
    def gathered(self, value: T) -> list[T]:
        """Returns the values of all ranks, by rank, on every rank."""

    def of_leader(self, value: T) -> T:
        """Returns the leader's value. Its decisions need not be computed by the others."""
        return self.gathered(value)[0]

    def least(self, value: int) -> int:
        return min(self.gathered(value))

    def check_equal(self, what: str, value: Any) -> None:
        """Raises ValueError on every rank, with `what` and two different values, unless all have the same value."""
        for rank, other in enumerate(values := self.gathered(value)):
            if other != values[0]:
                raise ValueError(f"ranks disagree about {what}: {values[0]!r} on rank 0, {other!r} on rank {rank}")


class SingleGroup(RankGroup):
    """The only rank of a worker."""

    ranks = SINGLE_RANK

    def gathered(self, value: T) -> list[T]:
        return [value]


SINGLE_GROUP = SingleGroup()

"""KV heads of one rank of a worker."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Consecutive KV heads of a model. A model of latents has one, which every rank holds.

    Attributes:
        total: KV heads of the model.
    """

    first: int
    num: int
    total: int

    @classmethod
    def of(cls, total: int, rank: int, degree: int) -> Self:
        """Returns the heads of one of `degree` ranks: an equal share, or one head that consecutive ranks replicate.

        Raises:
            ValueError: neither number divides the other.
        """
        if min(total, degree) >= 1 and total % degree == 0:
            num = total // degree
            return cls(rank * num, num, total)
        if min(total, degree) >= 1 and degree % total == 0:
            return cls(rank // (degree // total), 1, total)
        raise ValueError(
            f"{degree} ranks cannot share {total} KV heads: use a degree that divides {total} or is a multiple of it"
        )

    @property
    def end(self) -> int:
        return self.first + self.num

    def __str__(self) -> str:
        return f"KV heads {self.first} to {self.end - 1} of {self.total}"

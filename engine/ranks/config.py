"""Ranks of a worker: processes on one host that each hold a part of the model. Imports no torch."""

from dataclasses import dataclass

from tandem.head_slice import HeadSlice

MAX_DEGREE = 8
# Decoded sequences of a step, with followers: they keep a copy of each one's page table.
MAX_BATCH_SIZE = 8192
# Rows of the vocabulary are cut at multiples of this, because kernels read 16 bytes at a time.
VOCABULARY_STEP = 8


@dataclass(frozen=True, slots=True)
class RankConfig:
    """One rank of a worker.

    Attributes:
        rank: 0 is the leader, which schedules and samples; the others only compute.
        degree: number of ranks of the worker.
    """

    rank: int = 0
    degree: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.degree <= MAX_DEGREE:
            raise ValueError(f"rank {self.rank} of {self.degree} does not exist; a worker has 1 to {MAX_DEGREE} ranks")

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def share(self, size: int) -> range:
        """Returns this rank's part of range(size), cut into equal parts. The degree divides `size`."""
        each, rest = divmod(size, self.degree)
        assert not rest, f"{size} cannot be cut into {self.degree} equal parts"
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, num_kv_heads: int) -> HeadSlice:
        """Returns the key and value heads that this rank's query heads need.

        Raises:
            ValueError: neither the degree nor the number of heads divides the other.
        """
        return HeadSlice.of(num_kv_heads, self.rank, self.degree)

    def kv_head_copies(self, num_kv_heads: int) -> int:
        """Returns the number of ranks that hold the same key and value head."""
        return max(1, self.degree // num_kv_heads)

    def vocabulary(self, size: int) -> range:
        """Returns this rank's token ids of a vocabulary of `size`. Parts are equal; the last ranks may hold fewer or
        none."""
        each = -(-size // (self.degree * VOCABULARY_STEP)) * VOCABULARY_STEP if self.degree > 1 else size
        return range(min(size, self.rank * each), min(size, (self.rank + 1) * each))


SINGLE_RANK = RankConfig()

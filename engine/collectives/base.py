"""Operations over the devices of all ranks of a worker."""

from abc import ABC, abstractmethod

import torch

from tandem.engine.ranks.config import RankConfig


class Collectives(ABC):
    """Collective operations on a worker's ranks.

    All ranks call the same methods in the same order, with equal shapes and dtypes. On a GPU they run in order on the
    current stream, may be captured in graphs, and never wait on the host. On a CPU they return when they are done.

    A rank that waits is released by `abort`, or by the end of its process. Results are then undefined, and the process
    must end.
    """

    ranks: RankConfig

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks, with the same bits on each. Args: x: contiguous; may be overwritten."""

    def all_reduce_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns residual + all_reduce(x). Args: both may be overwritten; residual: equal on all ranks."""
        return residual.add_(self.all_reduce(x))

    @abstractmethod
    def gather_columns(
        self, part: torch.Tensor, num_columns: int, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Collects a matrix that is cut by columns, at the leader.

        The leader has the result after all ranks have come here, also those without columns, and after all that they
        launched before. So its tokens tell that the keys and values of all ranks are written.

        Args:
            part: (num_rows, n), the columns `ranks.vocabulary(num_columns)`.
            out: (num_rows, num_columns), the leader's result.

        Returns:
            (num_rows, num_columns) at the leader; None at followers.
        """

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> None:
        """Replaces x by the leader's."""

    @abstractmethod
    def check(self) -> None:
        """Raises RuntimeError if an operation was aborted, or lost a rank."""

    @abstractmethod
    def abort(self) -> None:
        """Releases all waiting operations of this rank. Callable from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Frees mappings and connections. This rank's operations have ended."""

"""Ranks of a worker as threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tandem.engine.collectives.base import Collectives
from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.group import RankGroup

T = TypeVar("T")
TIMEOUT_S = 60.0


class _Board:
    """A value of each thread. Threads that wait leave with an error when one fails."""

    def __init__(self, degree: int) -> None:
        self._values: list[Any] = [None] * degree
        self._barrier = threading.Barrier(degree, timeout=TIMEOUT_S)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._wait()
        values = list(self._values)
        self._wait()
        return values

    def abort(self) -> None:
        self._barrier.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise ConnectionError("another rank has ended") from error


class ThreadGroup(RankGroup):
    def __init__(self, ranks: RankConfig, board: _Board) -> None:
        self.ranks = ranks
        self._board = board

    def gathered(self, value: T) -> list[T]:
        return self._board.exchange(self.ranks.rank, value)


class ThreadCollectives(Collectives):
    """On CPU tensors. Sums in rank order."""

    def __init__(self, ranks: RankConfig, board: _Board) -> None:
        self.ranks = ranks
        self._board = board
        self._aborted = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._board.exchange(self.ranks.rank, x.clone())
        total = first.clone()
        for other in others:
            total += other
        return total

    def gather_columns(
        self, part: torch.Tensor, num_columns: int, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        whole = torch.cat(self._board.exchange(self.ranks.rank, part.clone()), -1)
        if not self.ranks.is_leader:
            return None
        assert whole.shape[-1] == num_columns
        return whole if out is None else out.copy_(whole)

    def broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._board.exchange(self.ranks.rank, x.clone())[0])

    def check(self) -> None:
        if self._aborted:
            raise RuntimeError("the ranks' operations were aborted")

    def abort(self) -> None:
        self._aborted = True
        self._board.abort()

    def close(self) -> None:
        return


def run_ranks(degree: int, run: Callable[[ThreadGroup, ThreadCollectives], T]) -> list[T]:
    """Runs a function once for each rank, at the same time. Returns the results by rank, or raises the first error."""
    for_group, for_tensors = _Board(degree), _Board(degree)

    def of_rank(rank: int) -> T:
        ranks = RankConfig(rank, degree)
        try:
            return run(ThreadGroup(ranks, for_group), ThreadCollectives(ranks, for_tensors))
        except BaseException:
            for_group.abort()
            for_tensors.abort()
            raise

    with ThreadPoolExecutor(degree) as pool:
        futures = [pool.submit(of_rank, rank) for rank in range(degree)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # Another rank's end is the consequence of the first error.
        raise next((error for error in errors if not isinstance(error, ConnectionError)), errors[0])
    return [future.result() for future in futures]

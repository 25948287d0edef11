"""Resets of all caches: each is complete when the store has said so to the last worker that carried it out."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fakes.page_store.worker import SimWorker


@dataclass(eq=False)
class _Reset:
    """
    Attributes:
        waiting: workers that have not carried it out.
        last: the worker that was the last to do so; its purge is under way.
        is_void: a worker died before, so nothing is promised.
    """

    number: int
    waiting: "set[SimWorker]"
    last: "SimWorker | None" = None
    is_void: bool = False
    is_complete: bool = False


@dataclass(eq=False)
class Resets:
    """Attributes: completed: number of the last complete reset; num_completed: complete ones."""

    completed: int = 0
    num_completed: int = 0
    _resets: list[_Reset] = field(default_factory=list)

    @property
    def last(self) -> int:
        return len(self._resets)

    def begin(self, workers: "list[SimWorker]") -> None:
        self._resets.append(_Reset(self.last + 1, set(workers), is_void=not workers))

    def seen(self, worker: "SimWorker", number: int) -> None:
        reset = self._resets[number - 1]
        reset.waiting.discard(worker)
        if not reset.waiting:
            reset.last = worker

    def lost(self, worker: "SimWorker") -> None:
        for reset in self._resets:
            if worker in reset.waiting or (worker is reset.last and not reset.is_complete):
                reset.is_void = True

    def purged(self, worker: "SimWorker", number: int) -> None:
        for reset in self._resets:
            if reset.last is worker and number >= reset.number and not reset.is_void and not reset.is_complete:
                reset.is_complete = True
                self.num_completed += 1
                self.completed = max(self.completed, reset.number)

    @property
    def incomplete(self) -> list[int]:
        return [reset.number for reset in self._resets if not reset.is_complete and not reset.is_void]

"""Copies between a worker's pool and the region that run half a page at a time, in any order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.pagestore.client.base import RegionCopies, RegionCopy
from tests.fakes.page_store.memory import HALVES

if TYPE_CHECKING:
    from tests.fakes.page_store.worker import SimWorker


@dataclass(eq=False)
class PageCopy:
    """
    Attributes:
        mark: content that the slot's key stands for; b"" if the key is unknown.
        began, ended: times.
        left: halves still to copy.
        seen_reset: number of the worker's last reset when the copy began.
    """

    worker: "SimWorker"
    is_out: bool
    page_id: int
    slot: int
    mark: bytes
    began: float
    ended: float = 0.0
    seen_reset: int = 0
    left: list[int] = field(default_factory=lambda: list(HALVES))


class _AllOf:
    def __init__(self, parts: Sequence[PageCopy]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return not any(part.left for part in self._parts)

    @property
    def seconds(self) -> float:
        return max(part.ended for part in self._parts) - self._parts[0].began


class SimCopies(RegionCopies):
    def __init__(self, worker: "SimWorker") -> None:
        self._worker = worker

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        return _AllOf([self._begin(True, page, slot) for page, slot in zip(page_ids, slots, strict=True)])

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> RegionCopy:
        return _AllOf([self._begin(False, page, slot) for page, slot in zip(page_ids, slots, strict=True)])

    def close(self) -> None:
        pass

    def _begin(self, is_out: bool, page_id: int, slot: int) -> PageCopy:
        copy = PageCopy(
            self._worker, is_out, page_id, slot, self._worker.view.mark_of(slot, is_out), self._worker.world.clock.now
        )
        self._worker.world.begin_copy(copy)
        return copy

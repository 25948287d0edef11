from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from tandem.engine.kvcache.base import Completion


class RegionCopy(Completion, Protocol):
    @property
    def seconds(self) -> float:
        """Duration without the wait for earlier copies, once it is done. The engine thread sees the end only in its
        next turn, which is longer than a small copy."""
        ...


class RegionCopies(ABC):
    """Copies between a worker's pool and the region, in the background. Slots and pages correspond by position.

    No copy is ordered with forward passes. Before a copy, the host has seen the end of all passes that use its pages;
    afterwards, a pass uses them only once the host has seen the copy's end.
    """

    @abstractmethod
    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        """Starts copies from the pool into slots. No running forward pass writes these pages."""

    @abstractmethod
    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> RegionCopy:
        """Starts copies from slots into the pool. No running forward pass uses these pages."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all copies, and ends the use of the region.

        Raises:
            RuntimeError: a copy does not end.
        """

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tandem.engine.kvcache.base import Completion


class RegionCopies(ABC):
    """Copies between a worker's pool and the region, in the background. Slots and pages correspond by position."""

    @abstractmethod
    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> Completion:
        """Starts copies from the pool into slots, after all launched forward passes' writes to these pages."""

    @abstractmethod
    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> Completion:
        """Starts copies from slots into the pool."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all copies and unmaps the region."""

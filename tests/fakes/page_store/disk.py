"""A disk below the store's memory whose transfers run half a page at a time, in any order, and may fail."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.pagestore.server.base import EndedTransfer, SlowTier, StoredPage
from tests.fakes.page_store.memory import HALF_BYTES, HALVES

if TYPE_CHECKING:
    from tests.fakes.page_store.world import World

MAX_IN_FLIGHT = 3


@dataclass(eq=False)
class DiskTransfer:
    """
    Attributes:
        contents: the halves moved so far, or read from the disk at the beginning.
        left: halves still to move.
    """

    page: StoredPage
    slot: int
    is_read: bool
    contents: list[bytes] = field(default_factory=list)
    left: list[int] = field(default_factory=lambda: list(HALVES))
    purged: bool = False


class SimTier(SlowTier):
    """One life of a tier. Attributes: in_flight: transfers that have not ended."""

    @property
    def is_busy(self) -> bool:
        """Whether something goes on that no action of the schedule ends."""
        return False

    def __init__(self) -> None:
        self.in_flight: list[DiskTransfer] = []

    @abstractmethod
    def run(self, transfer: DiskTransfer, half: int) -> None:
        """Moves half a page, if that happens at the simulation's command."""

    def holds(self, slot: int) -> bool:
        return any(transfer.slot == slot for transfer in self.in_flight)


class Disk(ABC):
    """What survives the store's process. Attributes: fails: every transfer fails, and none begins."""

    fails = False

    @abstractmethod
    def open(self, world: "World") -> SimTier:
        """Begins a life of the tier above it; the earlier one was closed."""


class SimDisk(Disk):
    """Attributes: pages: content of each page by its key, oldest first; the two halves."""

    def __init__(self, max_pages: int) -> None:
        self.max_pages = max_pages
        self.pages: dict[bytes, tuple[StoredPage, tuple[bytes, ...]]] = {}

    def open(self, world: "World") -> SimTier:
        return SimDiskTier(world, self)


class SimDiskTier(SimTier):
    def __init__(self, world: "World", disk: SimDisk) -> None:
        super().__init__()
        self._world, self._disk = world, disk
        self._ended: list[EndedTransfer] = []
        self._added = [page.identity for page, _ in disk.pages.values()]
        self._removed: list[bytes] = []

    def find(self, key: bytes) -> StoredPage | None:
        found = self._disk.pages.get(key)
        return None if found is None else found[0]

    def read(self, page: StoredPage, slot: int) -> None:
        self._world.check_untouched(slot, "is read into from the disk")
        stored = self._disk.pages.get(page.key)
        transfer = DiskTransfer(page, slot, True, list(stored[1]) if stored else [], purged=stored is None)
        self.in_flight.append(transfer)

    def write(self, page: StoredPage, slot: int) -> bool:
        if self._disk.fails or len(self.in_flight) >= MAX_IN_FLIGHT:
            return False
        self._world.check_is_stored(slot, page.key, "is written to the disk")
        self.in_flight.append(DiskTransfer(page, slot, False, [b"", b""]))
        return True

    def take_ended(self) -> Sequence[EndedTransfer]:
        ended, self._ended = self._ended, []
        return ended

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        changes = self._added, self._removed
        self._added, self._removed = [], []
        return changes

    def purge(self) -> None:
        for key in list(self._disk.pages):
            self._forget(key)
        for transfer in self.in_flight:
            transfer.purged = True

    def close(self) -> None:
        pass

    def run(self, transfer: DiskTransfer, half: int) -> None:
        """Moves half a page, and ends the transfer after the last half or if the disk fails."""
        transfer.left.remove(half)
        region = self._world.region
        if self._disk.fails:
            if transfer.is_read:
                region.write(transfer.slot, half, b"?" * HALF_BYTES)
            self._end(transfer, False)
        elif not transfer.is_read:
            transfer.contents[half] = region.read(transfer.slot, half)
        elif transfer.contents:
            region.write(transfer.slot, half, transfer.contents[half])
        if not transfer.left and transfer in self.in_flight:
            self._end(transfer, not transfer.purged)

    def _end(self, transfer: DiskTransfer, ok: bool) -> None:
        self.in_flight.remove(transfer)
        page = transfer.page
        if transfer.is_read:
            if not ok:
                self._forget(page.key)
            self._world.counts["read from disk"] += ok
        elif ok:
            if page.key not in self._disk.pages:
                self._added.append(page.identity)
            self._disk.pages[page.key] = page, tuple(transfer.contents)
            self._world.counts["written to disk"] += 1
            if len(self._disk.pages) > self._disk.max_pages:
                self._forget(next(iter(self._disk.pages)))
        self._ended.append(EndedTransfer(page, transfer.slot, ok))

    def _forget(self, key: bytes) -> None:
        if (stored := self._disk.pages.pop(key, None)) is not None:
            self._removed.append(stored[0].identity)

"""A slow tier whose transfers end when the test says so."""

from collections.abc import Sequence

from tandem.pagestore.server.base import EndedTransfer, SlowTier, StoredPage


class FakeSlowTier(SlowTier):
    """Keeps pages without content.

    Attributes:
        capacity: largest number of writes in flight.
        reads, writes: pages in flight, by slot.
    """

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self.pages: dict[bytes, StoredPage] = {}
        self.reads: dict[int, StoredPage] = {}
        self.writes: dict[int, StoredPage] = {}
        self._purged: set[int] = set()
        self._ended: list[EndedTransfer] = []
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    def add(self, page: StoredPage) -> None:
        self.pages[page.key] = page
        self._stored.append(page.identity)

    def remove(self, key: bytes) -> None:
        page = self.pages.pop(key, None)
        if page is not None:
            self._removed.append(page.identity)

    def end_read(self, slot: int, ok: bool = True) -> bool:
        """Returns whether the page was read: it was not purged meanwhile."""
        page = self.reads.pop(slot)
        ok = ok and slot not in self._purged
        if not ok and slot not in self._purged:
            self.remove(page.key)
        self._purged.discard(slot)
        self._ended.append(EndedTransfer(page, slot, ok))
        return ok

    def end_write(self, slot: int, ok: bool = True) -> None:
        page = self.writes.pop(slot)
        if ok and slot not in self._purged:
            self.add(page)
        self._purged.discard(slot)
        self._ended.append(EndedTransfer(page, slot, ok))

    def find(self, key: bytes) -> StoredPage | None:
        return self.pages.get(key)

    def read(self, page: StoredPage, slot: int) -> None:
        assert slot not in self.reads and slot not in self.writes
        self.reads[slot] = page

    def write(self, page: StoredPage, slot: int) -> bool:
        assert slot not in self.reads and slot not in self.writes
        if len(self.writes) >= self.capacity:
            return False
        self.writes[slot] = page
        return True

    def take_ended(self) -> Sequence[EndedTransfer]:
        ended, self._ended = self._ended, []
        return ended

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        changes, self._stored, self._removed = (self._stored, self._removed), [], []
        return changes

    def purge(self) -> None:
        for key in list(self.pages):
            self.remove(key)
        self._purged = {*self.reads, *self.writes}

    def close(self) -> None:
        pass

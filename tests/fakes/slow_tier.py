"""Slow tiers whose transfers end, and questions are answered, when the test says so."""

from collections.abc import Sequence

from tandem.pagestore.server.base import AskedTier, EndedTransfer, SlowTier, StoredPage


class FakeSlowTier(SlowTier):
    """Keeps pages without content.

    Attributes:
        capacity: largest number of writes in flight.
        reads, writes: pages in flight, by slot.
        has_unrecorded_purge: its `is_purging`.
    """

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self.has_unrecorded_purge = False
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

    @property
    def is_purging(self) -> bool:
        return self.has_unrecorded_purge

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


class FakeAskedTier(FakeSlowTier, AskedTier):
    """Finds only pages that an answer has named.

    Attributes:
        questions: keys of each question that is not answered.
        is_away: there is nobody to ask.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.questions: dict[int, tuple[bytes, ...]] = {}
        self.is_away = False
        self._num_questions = 0
        self._answered: list[int] = []
        self._named: set[bytes] = set()

    def answer(self, question: int) -> None:
        self._named.update(self.questions.pop(question))
        self._answered.append(question)

    def find(self, key: bytes) -> StoredPage | None:
        return super().find(key) if key in self._named else None

    def ask(self, keys: Sequence[bytes]) -> int | None:
        if self.is_away:
            return None
        self._num_questions += 1
        self.questions[self._num_questions] = tuple(keys)
        return self._num_questions

    def cancel(self, question: int) -> None:
        self.questions.pop(question, None)

    def take_answered(self) -> Sequence[int]:
        answered, self._answered = self._answered, []
        return answered

    def purge(self) -> None:
        super().purge()
        self._named.clear()

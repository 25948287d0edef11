"""Queued transfers of a disk tier. Their owner guards them with a lock."""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.disk.page_index import Place

# Reads taken before a waiting write has a turn.
_READS_PER_WRITE = 8
# A read joins a run that it continues only if it is among the next ones.
_MAX_AHEAD = 64


@dataclass(eq=False, slots=True)
class Transfer:
    """
    Attributes:
        place: of a page to read; None for a page to write.
        checksum: of a page to read.
        number: counts up in the order of arrival.
    """

    page: StoredPage
    slot: int
    number: int
    place: Place | None = None
    checksum: int = 0


@dataclass(eq=False, slots=True)
class Run:
    """Transfers of one system call.

    Attributes:
        transfers: those that have not ended.
        num_purges: of the folder, before the run began.
        began_at: on the tier's clock.
    """

    is_read: bool
    transfers: deque[Transfer]
    num_purges: int
    began_at: float
    numbers: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = tuple(transfer.number for transfer in self.transfers)


class TransferQueue:
    """Reads precede writes, but leave them every ninth turn.

    Args:
        run_len: transfers of one run at most.
        max_writes: writes that may wait.
    """

    def __init__(self, run_len: int, max_writes: int) -> None:
        self._run_len = run_len
        self._max_writes = max_writes
        self._reads: deque[Transfer] = deque()
        self._writes: deque[Transfer] = deque()
        self._numbers = itertools.count()
        self._reads_in_turn = 0

    @property
    def takes_writes(self) -> bool:
        return len(self._writes) < self._max_writes

    @property
    def first_read(self) -> int | None:
        """Number of the oldest read."""
        return self._reads[0].number if self._reads else None

    def next_number(self) -> int:
        """Returns a number for an act that is no transfer."""
        return next(self._numbers)

    def add_read(self, page: StoredPage, slot: int, place: Place, checksum: int) -> None:
        self._reads.append(Transfer(page, slot, next(self._numbers), place, checksum))

    def add_write(self, page: StoredPage, slot: int) -> None:
        self._writes.append(Transfer(page, slot, next(self._numbers)))

    def take_reads(self, may_write: bool) -> deque[Transfer]:
        """Returns reads of consecutive places; none if it is the turn of the writes, or none waits."""
        if not self._reads or (may_write and self._writes and self._reads_in_turn >= _READS_PER_WRITE):
            return deque()
        self._reads_in_turn += 1
        run = deque([self._reads.popleft()])
        while len(run) < self._run_len and (following := self._following(run[-1].place)) is not None:
            run.append(self._reads[following])
            del self._reads[following]
        return run

    def take_writes(self) -> deque[Transfer]:
        self._reads_in_turn = 0
        return deque(self._writes.popleft() for _ in range(min(self._run_len, len(self._writes))))

    def take_all(self) -> list[Transfer]:
        transfers = [*self._reads, *self._writes]
        self._reads.clear()
        self._writes.clear()
        return transfers

    def _following(self, place: Place | None) -> int | None:
        assert place is not None
        wanted = Place(place.segment, place.position + 1)
        return next(
            (i for i, read in enumerate(itertools.islice(self._reads, _MAX_AHEAD)) if read.place == wanted), None
        )


class StallWatch:
    """Notices a disk that does not answer.

    Counts only time between frequent looks, so a paused process blames no disk.
    """

    def __init__(self, limit_s: float, max_step_s: float = 1.0) -> None:
        self._limit_s = limit_s
        self._max_step_s = max_step_s
        self._oldest: int | None = None
        self._looked_at = 0.0
        self._waited_s = 0.0

    def is_stalled(self, numbers: Iterable[int], now: float) -> bool:
        """
        Args:
            numbers: of unfinished transfers.
        """
        oldest = min(numbers, default=None)
        if oldest is None or oldest != self._oldest:
            self._waited_s = 0.0
        else:
            self._waited_s += min(now - self._looked_at, self._max_step_s)
        self._oldest, self._looked_at = oldest, now
        return self._waited_s > self._limit_s

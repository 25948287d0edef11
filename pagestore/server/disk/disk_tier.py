"""A tier of pages in files. Content rests there in the clear, in a folder that belongs to this user alone."""

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tandem.messages import PageFormat
from tandem.pagestore.server.base import EndedTransfer, SlowTier, StoredPage
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.opened_folder import OpenedFolder
from tandem.pagestore.server.disk.page_index import Segment
from tandem.pagestore.server.disk.segment_files import MAX_BUFFERS, segment_name
from tandem.pagestore.server.disk.segment_format import is_storable
from tandem.pagestore.server.disk.transfers import Run, StallWatch, TransferQueue

logger = logging.getLogger(__name__)

_RUN_BYTES = 1 << 21
_QUEUED_WRITE_BYTES = 1 << 26
_STALL_LIMIT_S = 10.0
_CLOSE_LIMIT_S = 10.0


class DiskStats(NamedTuple):
    """
    Attributes:
        num_bytes: of all segments; the one being written counts in full.
        num_pages: found in the tier.
        num_read, num_written: pages, without failures.
        num_failed: transfers that ended with ok=False.
        read_s, write_s: time of all io threads together.
        is_off: a failure has turned the tier off, until the store restarts.
    """

    num_bytes: int
    num_pages: int
    num_read: int
    num_written: int
    num_failed: int
    read_s: float
    write_s: float
    is_off: bool


class DiskTier(SlowTier):
    """Pages in segments, written in order; the oldest segment leaves when the tier is full.

    Io threads move pages between the region and the files, and record purges. A further thread opens the folder, finds
    the pages of earlier lives, in the background, and frees what segments leave behind. The caller's thread touches no
    file. A transfer that the kernel does not end keeps its slot.

    Args:
        directory: no other store may use it.
        region: all slots, page-aligned for O_DIRECT. Must stay open until `close` returns.
        page_bytes: size of a slot.
        on_ended: called by any thread when transfers have ended; must not block.
        make_folder: as for `open_folder`.
        namespace_secret: given to the folder if it has none; "": the folder keeps its own.

    Attributes:
        is_loaded: whether all pages of earlier lives are found.

    Raises nothing: the tier is off if the disk fails, the folder is in use, open to others or another one, or max_bytes
    holds no page.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        page_format: PageFormat,
        region: memoryview | mmap.mmap,
        page_bytes: int,
        num_threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
        on_ended: Callable[[], None] = lambda: None,
        make_folder: bool = True,
        namespace_secret: str = "",
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._work_ready = threading.Condition(self._lock)
        self._tidying_ready = threading.Condition(self._lock)
        run_len = min(MAX_BUFFERS, max(1, _RUN_BYTES // page_bytes))
        self._queue = TransferQueue(run_len, max(2 * run_len, _QUEUED_WRITE_BYTES // page_bytes))
        self._watch, self._purge_watch = StallWatch(_STALL_LIMIT_S), StallWatch(_STALL_LIMIT_S)
        self._num_io_threads = num_threads
        self._running: set[Run] = set()
        self._max_write_runs = max(1, num_threads // 2)
        self._ended: list[EndedTransfer] = []
        self._num_read = self._num_written = self._num_failed = 0
        self._read_s = self._write_s = 0.0
        self._is_off = self._is_closing = self._has_damage = False
        self.is_loaded = self._is_recording = False
        # None until the folder is open, and once it is closed.
        self._folder: Folder | None = None
        # Numbers of the opening and of an unrecorded purge, among those of transfers.
        self._opening: int | None = self._queue.next_number()
        self._purge: int | None = None
        self._open_folder = partial(
            OpenedFolder.open,
            directory,
            max_bytes,
            replace(page_format, page_bytes=page_bytes),
            region,
            self._lock,
            lambda: self._is_closing,
            make=make_folder,
            namespace_secret=namespace_secret,
        )
        self._threads = [
            *(threading.Thread(target=self._work, name="disk-io", daemon=True) for _ in range(num_threads)),
            threading.Thread(target=self._tidy, name="disk-tidy", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def find(self, key: bytes) -> StoredPage | None:
        with self._lock:
            return self._book.index.find(key) if self._is_usable else None

    def read(self, page: StoredPage, slot: int) -> None:
        with self._lock:
            place = self._book.index.place(page.key) if self._is_usable and not self._is_closing else None
            if place is None:
                self._end_locked(page, slot, False)
            else:
                entry = self._book.index.segments[place.segment].entry(place.position)
                self._queue.add_read(page, slot, place, entry.checksum)
                self._work_ready.notify()

    def write(self, page: StoredPage, slot: int) -> bool:
        with self._lock:
            if not self._is_usable or self._is_closing or not self._book.is_listed or not self._queue.takes_writes:
                return False
            if self._book.index.place(page.key) is not None:
                self._end_locked(page, slot, True)
            elif not is_storable(page):
                self._end_locked(page, slot, False)
            else:
                self._queue.add_write(page, slot)
                self._work_ready.notify()
            return True

    def take_ended(self) -> Sequence[EndedTransfer]:
        with self._lock:
            waiting = [number for run in self._running for number in run.numbers]
            waiting += (each for each in (self._queue.first_read, self._opening, self._purge) if each is not None)
            is_stalled = self._watch.is_stalled(waiting, self._clock())
            purges = [self._purge] if self._purge is not None else []
            is_purge_stalled = self._purge_watch.is_stalled(purges, self._clock())
            # A thread that is free records the purge: the kernel may keep others for ever.
            has_free_thread = self._opening is None and len(self._running) < self._num_io_threads
        if is_stalled:
            self._turn_off(f"a transfer takes more than {_STALL_LIMIT_S:.0f} s")
        if is_purge_stalled or (is_stalled and not has_free_thread):
            self._give_up_purge()
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        if self._folder is None:
            return (), ()
        with self._lock:
            return self._book.index.changes.take()

    def purge(self) -> None:
        with self._lock:
            self._drop_queue_locked()
            if self._folder is not None:
                self._book.purge_locked()
            if self._purge is None:
                self._purge = self._queue.next_number()
            self._work_ready.notify()
            is_lost = self._folder is None and self._opening is None
        if is_lost:
            self._give_up_purge()

    @property
    def is_purging(self) -> bool:
        return self._purge is not None

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._drop_queue_locked()
            self._work_ready.notify_all()
            self._tidying_ready.notify_all()
        deadline = time.monotonic() + _CLOSE_LIMIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            # The kernel may still use the region and the files; the process's exit ends that.
            logger.warning("disk tier %s: a transfer does not end, so it stays open", self._directory)
        elif self._folder is not None:
            self._folder.close()
            self._folder = None
            self._io.close()

    @property
    def _is_usable(self) -> bool:
        return self._folder is not None and not self._is_off

    def stats(self) -> DiskStats:
        with self._lock:
            index = self._book.index if self._folder else None
            return DiskStats(
                index.num_bytes if index else 0,
                index.num_pages if index else 0,
                self._num_read,
                self._num_written,
                self._num_failed,
                self._read_s,
                self._write_s,
                self._is_off,
            )

    def _work(self) -> None:
        while (act := self._next_act()) is not None:
            act()

    def _next_act(self) -> Callable[[], None] | None:
        with self._work_ready:
            while True:
                if self._purge is not None and self._folder is not None and not self._is_recording:
                    self._is_recording = True
                    return self._record_purges
                if self._is_closing:
                    return None
                num_write_runs = sum(not run.is_read for run in self._running)
                may_write = num_write_runs < self._max_write_runs
                transfers, is_read = self._queue.take_reads(may_write), True
                if not transfers and may_write:
                    transfers, is_read = self._queue.take_writes(), False
                if transfers:
                    assert self._folder is not None
                    run = Run(is_read, transfers, self._folder.num_purges, self._clock())
                    self._running.add(run)
                    return partial(self._carry_out, run)
                self._work_ready.wait()

    def _carry_out(self, run: Run) -> None:
        self._or_turn_off(partial(self._read_run if run.is_read else self._write_run, run))
        self._end_run(run)

    def _record_purges(self) -> None:
        """Writes a few bytes to the page cache, so that the process may die from then on."""
        failure = ""
        try:
            self._book.record_purges()
        except OSError as error:
            failure = _reason(error)
        if failure:
            self._turn_off(failure)
            self._give_up_purge()
        with self._lock:
            self._is_recording = False
            assert self._folder is not None
            if self._folder.num_recorded == self._folder.num_purges:
                self._purge = None
            else:
                self._work_ready.notify()
            self._tidying_ready.notify()
        self._on_ended()

    def _give_up_purge(self) -> None:
        with self._lock:
            is_lost, self._purge = self._purge is not None, None
        if is_lost:
            logger.error("disk tier %s: a purge is not recorded, so pages stay: remove the folder", self._directory)

    def _read_run(self, run: Run) -> None:
        reads = list(run.transfers)
        place = reads[0].place
        assert place is not None
        with self._lock:
            segment = self._book.index.segments.get(place.segment)
        if segment is None:
            return
        try:
            are_whole = self._io.read(segment, place, reads)
        except OSError:
            if self._has(segment):
                raise
            return
        with self._lock:
            for read, ok in zip(reads, are_whole, strict=True):
                self._end_first_locked(run, ok)
                if not ok:
                    assert read.place is not None
                    self._book.index.forget(read.page.key, read.place)
            is_first = not all(are_whole) and not self._has_damage
            self._has_damage |= is_first
        if is_first:
            logger.warning(
                "disk tier %s: a page of %s does not match its checksum; more such pages count as failures only",
                self._directory,
                segment_name(place.segment),
            )

    def _write_run(self, run: Run) -> None:
        while run.transfers and (positions := self._book.allot(len(run.transfers), run.num_purges)):
            writes = list(run.transfers)[: positions.num]
            try:
                entries = self._io.write(positions, writes)
            except OSError:
                if self._has(positions.segment):
                    raise
                return
            with self._lock:
                is_there = self._book.index.segments.get(positions.segment.number) is positions.segment
                for position, entry in enumerate(entries, positions.first):
                    if is_there:
                        self._book.index.add(positions.segment, position, entry)
                    self._end_first_locked(run, is_there)

    def _has(self, segment: Segment) -> bool:
        """Returns whether a segment was neither purged nor evicted, which removes its file."""
        with self._lock:
            return self._book.index.segments.get(segment.number) is segment

    def _end_run(self, run: Run) -> None:
        with self._lock:
            while run.transfers:
                self._end_first_locked(run, False)
            self._running.remove(run)
            seconds = self._clock() - run.began_at
            if run.is_read:
                self._read_s += seconds
            else:
                self._write_s += seconds
                self._work_ready.notify()
            if self._book.has_retired:
                self._tidying_ready.notify()
        self._on_ended()

    def _end_first_locked(self, run: Run, ok: bool) -> None:
        transfer = run.transfers.popleft()
        assert self._folder is not None
        ok = ok and not self._is_off and run.num_purges == self._folder.num_purges
        if ok and run.is_read:
            self._num_read += 1
        elif ok:
            self._num_written += 1
        self._end_locked(transfer.page, transfer.slot, ok)

    def _end_locked(self, page: StoredPage, slot: int, ok: bool) -> None:
        self._num_failed += not ok
        self._ended.append(EndedTransfer(page, slot, ok))

    def _drop_queue_locked(self) -> None:
        for transfer in self._queue.take_all():
            self._end_locked(transfer.page, transfer.slot, False)

    def _open(self) -> None:
        try:
            opened = self._open_folder()
        except ValueError as error:
            self._turn_off(str(error))
            return
        with self._lock:
            # The opening may have taken too long.
            if is_wanted := not self._is_off:
                self._folder, self._book, self._io = opened
            # Later purges are recorded by io threads: two records at once could lose the later one.
            must_record = is_wanted and self._purge is not None
            if must_record:
                self._book.purge_locked()
                self._is_recording = True
        if not is_wanted:
            opened.close()
        elif must_record:
            self._record_purges()

    def _tidy(self) -> None:
        self._or_turn_off(self._open)
        with self._lock:
            self._opening = None
            is_open = self._folder is not None
        if not is_open:
            self._give_up_purge()
            self._on_ended()
            return
        self._or_turn_off(self._load)
        while True:
            with self._tidying_ready:
                while not self._book.has_retired and not self._is_closing:
                    self._tidying_ready.wait()
                if not self._book.has_retired:
                    return
            self._or_turn_off(self._book.tidy)

    def _load(self) -> None:
        for _ in self._book.load():
            self._book.tidy()
            if self._is_closing:
                return
        self.is_loaded = True

    def _or_turn_off(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self._turn_off(_reason(error))
        except Exception as error:
            logger.exception("disk tier %s: an unexpected failure", self._directory)
            self._turn_off(repr(error))

    def _turn_off(self, reason: str) -> None:
        with self._lock:
            if self._is_off:
                return
            self._is_off = True
            self._drop_queue_locked()
            if self._folder is not None:
                self._book.close_locked()
                self._tidying_ready.notify()
        logger.error("disk tier %s is off until the store restarts: %s", self._directory, reason)


def _reason(error: OSError) -> str:
    return error.strerror or repr(error)

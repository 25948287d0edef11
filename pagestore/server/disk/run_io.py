import logging
import threading
from collections.abc import Callable
from pathlib import Path

from tandem.pagestore.server.disk.page_index import Segment
from tandem.pagestore.server.disk.page_io import PageIo
from tandem.pagestore.server.disk.segment_book import SegmentBook
from tandem.pagestore.server.disk.segment_files import segment_name
from tandem.pagestore.server.disk.transfers import Run

logger = logging.getLogger(__name__)


class RunIo:
    """Carries out runs of transfers on an opened folder, in any io thread."""

    def __init__(
        self,
        directory: Path,
        book: SegmentBook,
        io: PageIo,
        lock: threading.Lock,
        end_first: Callable[[Run, bool], None],
    ) -> None:
        """
        Args:
            directory: for messages.
            lock: of the book.
            end_first: takes the end of a run's first transfer, under the lock.
        """
        self._directory = directory
        self._book = book
        self._io = io
        self._lock = lock
        self._end_first = end_first
        self._has_damage = False

    def carry_out(self, run: Run) -> None:
        """Ends the run's transfers, except those of segments that have left. Raises OSError: the disk fails."""
        if run.is_read:
            self._read(run)
        else:
            self._write(run)

    def _read(self, run: Run) -> None:
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
                self._end_first(run, ok)
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

    def _write(self, run: Run) -> None:
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
                    self._end_first(run, is_there)

    def _has(self, segment: Segment) -> bool:
        """Returns whether a segment was neither purged nor evicted, which removes its file."""
        with self._lock:
            return self._book.index.segments.get(segment.number) is segment

"""The segments of a folder: where the next pages go, which segments leave, and what earlier lives have left."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.messages import PageFormat
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.page_index import PageIndex, Segment
from tandem.pagestore.server.disk.segment_files import SegmentFiles, segment_name
from tandem.pagestore.server.disk.segment_format import (
    ENTRY_BYTES,
    MAX_PAGES,
    OtherVersion,
    SegmentHead,
    TornHead,
    decode_entries,
)

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 1 << 28
# The oldest segment leaves as a whole: at most this share of the tier.
_MIN_SEGMENTS = 8
_EPOCH_BYTES = 16


class Positions(NamedTuple):
    """Consecutive positions of a segment, to be written."""

    segment: Segment
    head: SegmentHead
    first: int
    num: int


@dataclass(slots=True)
class _Current:
    segment: Segment
    head: SegmentHead
    num_taken: int = 0


class SegmentBook:
    """
    `lock` guards the index, and is never held while a file is touched. Methods named `..._locked` want it held, all
    others want it free.

    Attributes:
        is_listed: whether segments of earlier lives are counted; before, nothing may be written.
    """

    def __init__(
        self, folder: Folder, files: SegmentFiles, page_format: PageFormat, max_bytes: int, lock: threading.Lock
    ) -> None:
        """Raises ValueError if no page fits."""
        self.index = PageIndex()
        self.is_listed = False
        self._is_closed = False
        self._folder = folder
        self._files = files
        self._max_bytes = max_bytes
        self._lock = lock
        self._allotting = threading.Lock()
        self._current: _Current | None = None
        self._next_number = 0
        # With whether their files are to be removed.
        self._retired: deque[tuple[Segment, bool]] = deque()
        self._skipped: dict[str, list[int]] = {}
        self._num_torn_pages = 0
        num_pages = min(_SEGMENT_BYTES, max_bytes // _MIN_SEGMENTS) // (page_format.page_bytes + ENTRY_BYTES)
        self._head = SegmentHead(
            folder.name,
            folder.num_purges,
            "0" * 2 * _EPOCH_BYTES,
            page_format.model_fingerprint,
            page_format.layout,
            page_format.page_bytes,
            max(1, min(num_pages, MAX_PAGES)),
        )
        self._head.encode()
        if self._head.num_bytes > max_bytes:
            raise ValueError(
                f"the disk tier {folder.path} may have {max_bytes} bytes, but a page needs {self._head.num_bytes}: "
                "raise its size"
            )

    @property
    def has_retired(self) -> bool:
        """Whether `tidy` has something to do."""
        return bool(self._retired) and (self._is_recorded or not self._retired[0][1])

    @property
    def _is_recorded(self) -> bool:
        return self._folder.num_recorded == self._folder.num_purges

    def allot(self, num_pages: int, num_purges: int) -> Positions | None:
        """Returns positions for some of the pages, in a new segment if the last is full. Raises OSError.

        Args:
            num_purges: of the folder when the pages were taken up; None is returned if more have followed, and when the
                book is closed.
        """
        with self._allotting:
            with self._lock:
                if self._is_closed or num_purges != self._folder.num_purges:
                    return None
                if positions := self._take_locked(num_pages):
                    return positions
            head = replace(self._head, num_purges=num_purges, epoch=os.urandom(_EPOCH_BYTES).hex())
            self._make_room(head.num_bytes)
            segment = Segment(self._next_number, head.num_bytes)
            segment.pages_offset = head.pages_offset
            self._next_number += 1
            self._files.create(segment.number, head)
            with self._lock:
                if not self._is_closed and num_purges == self._folder.num_purges:
                    self.index.add_segment(segment)
                    self._current = _Current(segment, head)
                    return self._take_locked(num_pages)
            self._remove(segment.number)
            return None

    def purge_locked(self) -> None:
        """Forgets all pages. Their files leave once `record_purges` has run."""
        self._folder.num_purges += 1
        self._forget_all(remove=True)

    def record_purges(self) -> None:
        """Makes the purges outlive this process. Raises OSError: they cannot be recorded."""
        self._folder.record_purges()

    def close_locked(self) -> None:
        """Forgets all pages, whose files stay, and finds or takes none any more."""
        self._is_closed = True
        self._forget_all(remove=False)

    def tidy(self) -> None:
        """Frees the memory of retired segments, and removes their files. Raises OSError."""
        is_synced = False
        while True:
            with self._lock:
                if not self.has_retired:
                    return
                segment, remove = self._retired.popleft()
                self.index.clean(segment)
            if remove:
                # Else the file's end may reach the disk before the purge does.
                if not is_synced:
                    self._folder.sync()
                    is_synced = True
                self._remove(segment.number)

    def load(self) -> Iterator[None]:
        """Lists the segments of earlier lives, and finds their pages, newest first. Yields after each segment.

        Raises OSError if the folder cannot be read.
        """
        began = time.monotonic()
        sizes = self._files.sizes()
        with self._lock:
            if self._is_closed:
                return
            for number, num_bytes in sizes.items():
                self.index.add_segment(Segment(number, num_bytes))
            self._next_number = max(sizes, default=-1) + 1
            self.is_listed = True
        self._make_room(0)
        self._warn_of_little_space()
        for number in reversed(sizes):
            self._load_segment(number, sizes[number])
            yield
        with self._lock:
            num_pages = self.index.num_pages
        logger.info(
            "disk tier %s: %d pages in %d segments, read in %.1f s",
            self._folder.path,
            num_pages,
            len(sizes),
            time.monotonic() - began,
        )
        for kind, numbers in self._skipped.items():
            logger.warning(
                "disk tier %s: skipped %d segments %s, the newest is %s",
                self._folder.path,
                len(numbers),
                kind,
                segment_name(numbers[0]),
            )
        if self._num_torn_pages:
            logger.warning("disk tier %s: skipped %d torn pages", self._folder.path, self._num_torn_pages)

    def _forget_all(self, remove: bool) -> None:
        self._current = None
        self._retired.extend((segment, remove) for segment in self.index.retire_all())

    def _take_locked(self, num_pages: int) -> Positions | None:
        current = self._current
        if current is None or current.num_taken == current.head.num_pages:
            return None
        first = current.num_taken
        num_pages = min(num_pages, current.head.num_pages - first)
        current.num_taken += num_pages
        return Positions(current.segment, current.head, first, num_pages)

    def _make_room(self, num_bytes: int) -> None:
        while True:
            with self._lock:
                if not self.index.segments or self.index.num_bytes + num_bytes <= self._max_bytes:
                    return
                segment = self.index.retire(next(iter(self.index.segments)))
                if self._current and self._current.segment is segment:
                    self._current = None
                self._retired.append((segment, False))
            self._remove(segment.number)

    def _warn_of_little_space(self) -> None:
        about = os.fstatvfs(self._folder.descriptor)
        available = self.index.num_bytes + about.f_bavail * about.f_frsize
        if available < self._max_bytes:
            logger.warning(
                "disk tier %s may have %d bytes, but its file system has room for %d: a full disk turns it off",
                self._folder.path,
                self._max_bytes,
                available,
            )

    def _remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(number)

    def _load_segment(self, number: int, num_bytes: int) -> None:
        try:
            head, table = self._files.read_head(number)
        except TornHead:
            self._skip(number, "with a torn head")
            return
        except OtherVersion:
            self._skip(number, "of another version of the format")
            return
        except OSError as error:
            if number in self.index.segments:
                self._skip(number, f"that cannot be read ({error.strerror})")
            return
        expected = replace(self._head, num_purges=head.num_purges, epoch=head.epoch, num_pages=head.num_pages)
        entries, num_torn = decode_entries(head.epoch, table) if head == expected else ([], 0)
        whole = [(position, entry) for position, entry in entries if head.page_offset(position + 1) <= num_bytes]
        with self._lock:
            segment = self.index.segments.get(number)
            if segment is None:
                return
            if head.folder != self._head.folder or head.num_purges > self._folder.num_purges:
                self._skip(number, "of another folder")
            elif head.num_purges < self._folder.num_purges:
                self._retired.append((self.index.retire(number), True))
            elif head != expected:
                self._skip(number, "of another model or page layout")
            else:
                self._num_torn_pages += num_torn + len(entries) - len(whole)
                segment.pages_offset = head.pages_offset
                if whole:
                    segment.reserve(whole[-1][0] + 1)
                for position, entry in whole:
                    self.index.add(segment, position, entry)

    def _skip(self, number: int, kind: str) -> None:
        self._skipped.setdefault(kind, []).append(number)

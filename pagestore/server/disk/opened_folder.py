"""The folder of a disk tier, opened for one store."""

import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from tandem.messages import PageFormat
from tandem.pagestore.server.disk.folder import Folder, FolderInUse
from tandem.pagestore.server.disk.page_io import PageIo
from tandem.pagestore.server.disk.secret import keep_secret
from tandem.pagestore.server.disk.segment_book import SegmentBook
from tandem.pagestore.server.disk.segment_files import SegmentFiles

# How long an ending store may still hold the folder, and the interval between looks, in seconds.
IN_USE_LIMIT_S, LOOK_INTERVAL_S = 3.0, 0.05


class OpenedFolder(NamedTuple):
    folder: Folder
    book: SegmentBook
    io: PageIo

    @classmethod
    def open(
        cls,
        directory: Path,
        max_bytes: int,
        page_format: PageFormat,
        region: memoryview | mmap.mmap,
        lock: threading.Lock,
        is_closing: Callable[[], bool],
        *,
        make: bool,
        namespace_secret: str,
    ) -> Self:
        """
        Args:
            page_format: with the size of a slot.
            lock: of the book.
            is_closing: ends the wait for another store's end.
            make, namespace_secret: as for DiskTier.

        Raises:
            ValueError: the folder is in use, open to others or another cluster's, or max_bytes holds no page.
            OSError: the disk fails.
        """
        folder = _folder(directory, is_closing, make=make)
        try:
            if namespace_secret:
                keep_secret(folder.descriptor, directory, namespace_secret)
            files = SegmentFiles(folder, page_format.page_bytes)
            book = SegmentBook(folder, files, page_format, max_bytes, lock)
            return cls(folder, book, PageIo(region, page_format.page_bytes, files))
        except (ValueError, OSError):
            folder.close()
            raise

    def close(self) -> None:
        self.folder.close()
        self.io.close()


def purge_folder(directory: Path) -> None:
    """Purges a folder that no store has open. Raises FolderInUse: one has; ValueError, OSError: as `OpenedFolder.open`.

    Waits for the disk.
    """
    folder = _folder(directory, lambda: False, make=False)
    try:
        folder.num_purges += 1
        folder.record_purges()
        folder.sync()
    finally:
        folder.close()


def _folder(directory: Path, is_closing: Callable[[], bool], *, make: bool) -> Folder:
    deadline = time.monotonic() + IN_USE_LIMIT_S
    while True:
        try:
            return Folder(directory, make=make)
        except FolderInUse:
            if is_closing() or time.monotonic() >= deadline:
                raise
            time.sleep(LOOK_INTERVAL_S)

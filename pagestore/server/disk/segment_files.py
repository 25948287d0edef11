import contextlib
import errno
import logging
import os
import re
from collections.abc import Sequence

from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.segment_format import (
    ENTRY_BYTES,
    HEAD_BYTES,
    SegmentHead,
)

logger = logging.getLogger(__name__)

# Buffers of one system call.
MAX_BUFFERS = 1024
# Sectors of a disk have this size or 4,096 bytes.
_SECTOR_BYTES = 512
# A first read that holds the entries of most segments.
_FIRST_READ_BYTES = 65536
_NAME = re.compile(r"segment-(\d{12})\.pages")


def segment_name(number: int) -> str:
    return f"segment-{number:012d}.pages"


class SegmentFiles:
    """Files of segments in a folder. Pages bypass the page cache (O_DIRECT) as long as the file system allows it.

    Any thread may call all methods.

    Attributes:
        is_direct: whether pages bypass the page cache.
    """

    def __init__(self, folder: Folder, page_bytes: int) -> None:
        self._folder = folder
        self.is_direct = True
        if page_bytes % _SECTOR_BYTES:
            self._use_page_cache(f"pages of {page_bytes} bytes are no multiple of {_SECTOR_BYTES}")

    def sizes(self) -> dict[int, int]:
        """Returns the bytes of all segments by number, in order of their numbers."""
        sizes = {}
        with os.scandir(self._folder.descriptor) as files:
            for file in files:
                if match := _NAME.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        sizes[int(match[1])] = file.stat(follow_symlinks=False).st_size
        return dict(sorted(sizes.items()))

    def read_head(self, number: int) -> tuple[SegmentHead, bytes]:
        """Returns the head of a segment and its table of entries, without those behind a truncated file's end.

        Raises TornHead, OtherVersion, OSError.
        """
        descriptor = self._open(number, os.O_RDONLY)
        try:
            start = os.pread(descriptor, _FIRST_READ_BYTES, 0)
            head = SegmentHead.decode(start[:HEAD_BYTES])
            table_end = HEAD_BYTES + ENTRY_BYTES * head.num_pages
            if len(start) == _FIRST_READ_BYTES < table_end:
                start += os.pread(descriptor, table_end - _FIRST_READ_BYTES, _FIRST_READ_BYTES)
            return head, start[HEAD_BYTES:table_end]
        finally:
            os.close(descriptor)

    def read(self, number: int, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fills consecutive buffers; returns the bytes read, fewer at the end of a file. Raises OSError."""
        while True:
            is_direct = self.is_direct
            try:
                descriptor = self._open(number, os.O_RDONLY | (os.O_DIRECT if is_direct else 0))
                try:
                    return os.preadv(descriptor, buffers, offset)
                finally:
                    os.close(descriptor)
            except OSError as error:
                self._handle(error, is_direct)

    def create(self, number: int, head: SegmentHead) -> None:
        """Raises OSError."""
        descriptor = self._open(number, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _write_all(descriptor, [memoryview(head.encode())], 0)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(number)
            raise
        finally:
            os.close(descriptor)

    def remove(self, number: int) -> None:
        """Raises OSError."""
        os.unlink(segment_name(number), dir_fd=self._folder.descriptor)

    def write(self, number: int, head: SegmentHead, first: int, pages: Sequence[memoryview], entries: bytes) -> None:
        """Writes consecutive pages, then their entries. Raises OSError, also if the file system takes only a part."""
        while True:
            is_direct = self.is_direct
            try:
                self._write_at(number, os.O_DIRECT if is_direct else 0, pages, head.page_offset(first))
                break
            except OSError as error:
                self._handle(error, is_direct)
        self._write_at(number, 0, [memoryview(entries)], HEAD_BYTES + ENTRY_BYTES * first)

    def _write_at(self, number: int, flags: int, buffers: Sequence[memoryview], offset: int) -> None:
        descriptor = self._open(number, os.O_WRONLY | flags)
        try:
            _write_all(descriptor, buffers, offset)
        finally:
            os.close(descriptor)

    def _open(self, number: int, flags: int) -> int:
        return os.open(segment_name(number), flags, 0o600, dir_fd=self._folder.descriptor)

    def _handle(self, error: OSError, was_direct: bool) -> None:
        if not was_direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise error
        if self.is_direct:
            self._use_page_cache("the file system refuses O_DIRECT")

    def _use_page_cache(self, why: str) -> None:
        self.is_direct = False
        logger.warning("disk tier %s: %s, so pages pass through the page cache", self._folder.path, why)


def _write_all(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    num_bytes = sum(len(buffer) for buffer in buffers)
    num_written = os.pwritev(descriptor, buffers, offset)
    if num_written != num_bytes:
        raise OSError(errno.ENOSPC, f"the disk or a quota is full ({num_written} of {num_bytes} bytes written)")

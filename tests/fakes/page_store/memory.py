"""Memory whose pages hold marks: digests of the tokens whose KV a page would hold."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from mmap import mmap

from tandem.messages import PageFormat

PAGE_SIZE = 2
MARK_BYTES = 32
# Behind the mark: number of resets before the page was computed.
STAMP_BYTES = 8
HALF_BYTES = MARK_BYTES + STAMP_BYTES
# Disks are read and written in blocks.
PAGE_BYTES = 4096
PAGE_FORMAT = PageFormat("fake", PAGE_BYTES, "fake")
# A page is copied and computed in two halves, so that torn pages are seen.
HALVES = (0, 1)


@lru_cache(100_000)
def content_mark(namespace: str, token_ids: tuple[int, ...]) -> bytes:
    """Returns the mark of the page that ends with the last of these tokens; a partly filled page has one of its own."""
    return blake2b(repr((namespace, token_ids)).encode(), digest_size=MARK_BYTES).digest()


class Memory:
    """Pages of two halves, each with a mark and a stamp.

    Attributes:
        bytes: all pages, aligned for O_DIRECT.
    """

    def __init__(self, num_pages: int) -> None:
        self.bytes = mmap(-1, num_pages * PAGE_BYTES)

    def read(self, page: int, half: int) -> bytes:
        start = page * PAGE_BYTES + half * (PAGE_BYTES // 2)
        return self.bytes[start : start + HALF_BYTES]

    def write(self, page: int, half: int, content: bytes) -> None:
        assert len(content) == HALF_BYTES
        start = page * PAGE_BYTES + half * (PAGE_BYTES // 2)
        self.bytes[start : start + HALF_BYTES] = content

    def holds(self, page: int, mark: bytes, halves: Sequence[int] = HALVES) -> bool:
        return all(self.read(page, half)[:MARK_BYTES] == mark for half in halves)

    def stamp(self, page: int) -> int:
        """Returns the lower stamp of the page's halves."""
        return min(int.from_bytes(self.read(page, half)[MARK_BYTES:], "little") for half in HALVES)


def content(mark: bytes, stamp: int) -> bytes:
    return mark + stamp.to_bytes(STAMP_BYTES, "little")

"""A disk tier with a region of its own, and pages whose content follows from their number."""

import mmap
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from tandem.messages import PageFormat
from tandem.pagestore.keys import page_key
from tandem.pagestore.server.base import EndedTransfer, StoredPage
from tandem.pagestore.server.disk.disk_tier import DiskTier

PAGE_BYTES = 8192
PAGE_FORMAT = PageFormat("f" * 32, PAGE_BYTES, "page_size=16 float32")
NUM_SLOTS = 16
LIMIT_S = 20.0


def stored_page(number: int, namespace: str = "a") -> StoredPage:
    key = page_key(b"", [number])
    return StoredPage(key, page_key(b"", [number - 1]) if number else b"", key[:8], namespace)


def page_content(number: int, page_bytes: int = PAGE_BYTES) -> bytes:
    return random.Random(number).randbytes(page_bytes)


class DiskPages:
    """Slot i is used for the page i % NUM_SLOTS."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int = 1 << 26,
        page_format: PageFormat = PAGE_FORMAT,
        page_bytes: int = PAGE_BYTES,
        num_threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
        namespace_secret: str = "",
    ) -> None:
        self.region = mmap.mmap(-1, NUM_SLOTS * page_bytes)
        self.page_bytes = page_bytes
        self.tier = DiskTier(
            directory,
            max_bytes,
            page_format,
            self.region,
            page_bytes,
            num_threads,
            clock,
            namespace_secret=namespace_secret,
        )

    def __enter__(self) -> "DiskPages":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tier.close()

    def fill(self, number: int) -> int:
        """Fills a page's slot, and returns it."""
        return self.fill_slot(number, number % NUM_SLOTS)

    def fill_slot(self, number: int, slot: int) -> int:
        self.region[slot * self.page_bytes : (slot + 1) * self.page_bytes] = page_content(number, self.page_bytes)
        return slot

    def content(self, slot: int) -> bytes:
        return self.region[slot * self.page_bytes : (slot + 1) * self.page_bytes]

    def write(self, numbers: Iterable[int]) -> list[int]:
        """Writes pages one after another; returns those that were written."""
        return [number for number in numbers if self.write_one(number)]

    def write_one(self, number: int) -> bool:
        slot = self.fill(number)
        until(lambda: self.tier.stats().is_off or self.tier.write(stored_page(number), slot))
        if self.tier.stats().is_off:
            return False
        (ended,) = self.ended(1)
        assert (ended.page, ended.slot) == (stored_page(number), slot)
        return ended.ok

    def read(self, numbers: Iterable[int]) -> list[int]:
        """Reads pages; returns those that are found and read. Fails on foreign content."""
        return [number for number in numbers if self.read_one(number)]

    def read_one(self, number: int) -> bool:
        page = self.tier.find(stored_page(number).key)
        if page is None:
            return False
        assert page == stored_page(number)
        slot = number % NUM_SLOTS
        self.region[slot * self.page_bytes : (slot + 1) * self.page_bytes] = bytes(self.page_bytes)
        self.tier.read(page, slot)
        (ended,) = self.ended(1)
        assert (ended.page, ended.slot) == (page, slot)
        if ended.ok:
            assert self.content(slot) == page_content(number, self.page_bytes)
        else:
            assert self.tier.find(page.key) is None
        return ended.ok

    def ended(self, num: int) -> list[EndedTransfer]:
        ended: list[EndedTransfer] = []

        def have_ended() -> bool:
            ended.extend(self.tier.take_ended())
            return len(ended) >= num

        until(have_ended)
        assert len(ended) == num
        return ended

    def purge(self) -> None:
        """Purges, and waits until that outlives this process."""
        self.tier.purge()
        until(lambda: not self.tier.is_purging)

    def wait_loaded(self) -> None:
        """Waits until the pages of earlier lives are known."""
        until(lambda: self.tier.is_loaded or self.tier.stats().is_off)


def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.0005)

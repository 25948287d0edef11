"""The store over a disk tier: more prefixes than memory holds, in this life of the store and the next."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from tandem.pagestore.messages import DISK
from tandem.pagestore.server.page_store import PageStore
from tests.fakes.disk_pages import NUM_SLOTS, DiskPages, until
from tests.fakes.store_client import StoreClient

CHAIN_LEN = 7
CHAINS = [[letter * (i + 1) for i in range(CHAIN_LEN)] for letter in "abcdef"]


def content(name: str, page_bytes: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(page_bytes)


class Life:
    def __init__(self, pages: DiskPages) -> None:
        self.pages = pages
        self.store = PageStore(NUM_SLOTS, time.monotonic, [(DISK, pages.tier)])
        self.client = StoreClient(self.store)

    def idle(self) -> bool:
        self.store.poll()
        stats = self.store.stats()
        return stats.num_queued == stats.num_written_behind == stats.num_reading == 0

    def put(self, name: str, parent: str) -> None:
        ((slot, generation),) = self.client.put([name], parent)
        if slot >= 0:
            size = self.pages.page_bytes
            self.pages.region[slot * size : (slot + 1) * size] = content(name, size)
            self.client.wrote([(slot, generation)])
        until(self.idle)

    def load(self, names: Sequence[str]) -> int:
        """Returns the length of the stored run. Fails on foreign content."""
        found = self.client.find(names)
        slots, num_coming = [*found.slots], found.num_coming
        while num_coming:
            for answer in self.client.found():
                slots, num_coming = [*slots, *answer.slots], answer.num_coming
        for name, slot in zip(names, slots, strict=False):
            assert self.pages.content(slot) == content(name, self.pages.page_bytes)
        self.client.end_find(found)
        assert self.store.check_integrity() == ""
        return len(slots)


@contextmanager
def life(folder: Path) -> Iterator[Life]:
    with DiskPages(folder) as pages:
        pages.wait_loaded()
        yield Life(pages)


def test_prefixes_that_left_the_memory_come_back_from_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    with life(folder) as first:
        for name in chain.from_iterable(CHAINS):
            first.put(name, name[:-1])
        assert first.pages.tier.stats().num_pages == CHAIN_LEN * len(CHAINS)
        assert [first.load(names) for names in CHAINS * 2] == [CHAIN_LEN] * 2 * len(CHAINS)
    with life(folder) as second:
        assert [second.load(names) for names in CHAINS * 2] == [CHAIN_LEN] * 2 * len(CHAINS)
        assert second.pages.tier.stats().num_read > CHAIN_LEN * len(CHAINS)
        assert second.pages.tier.stats().num_written == 0
        second.client.purge()
        until(lambda: not second.pages.tier.is_purging)
        assert [second.load(names) for names in CHAINS] == [0] * len(CHAINS)
    with life(folder) as third:
        assert [third.load(names) for names in CHAINS] == [0] * len(CHAINS)

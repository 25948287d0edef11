"""The store's disk tier on a folder, whose io threads move pages whenever they like."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.pagestore.server.base import EndedTransfer, StoredPage
from tandem.pagestore.server.disk.disk_tier import DiskTier
from tests.fakes.page_store.disk import Disk, DiskTransfer, SimTier
from tests.fakes.page_store.memory import PAGE_BYTES, PAGE_FORMAT

if TYPE_CHECKING:
    from tests.fakes.page_store.world import World

# Time for the io threads, in seconds.
WAIT_S = 0.0002


class RealDisk(Disk):
    def __init__(self, folder: Path, max_pages: int) -> None:
        self._folder = folder
        self._max_bytes = max_pages * PAGE_BYTES

    def open(self, world: "World") -> SimTier:
        return WatchedDiskTier(world, self._folder, self._max_bytes)

    def damage(self, number: int) -> None:
        """Changes bytes of a file, in the half with more pages than heads."""
        # The tier may remove files at any time.
        with contextlib.suppress(FileNotFoundError):
            self._damage(number)

    def _damage(self, number: int) -> None:
        files = sorted(path for path in self._folder.rglob("*") if path.is_file() and path.stat().st_size > PAGE_BYTES)
        if files:
            path = files[number % len(files)]
            content = bytearray(path.read_bytes())
            for offset in range(len(content) // 2, len(content), PAGE_BYTES // 2):
                content[offset] ^= 0xFF
            with path.open("r+b") as file:
                file.write(content)


class WatchedDiskTier(SimTier):
    def __init__(self, world: "World", folder: Path, max_bytes: int) -> None:
        super().__init__()
        self._world = world
        self._tier = DiskTier(folder, max_bytes, PAGE_FORMAT, world.region.bytes, PAGE_BYTES, num_threads=2)

    def find(self, key: bytes) -> StoredPage | None:
        return self._tier.find(key)

    def read(self, page: StoredPage, slot: int) -> None:
        self._world.check_untouched(slot, "is read into from the disk")
        self.in_flight.append(DiskTransfer(page, slot, True))
        self._tier.read(page, slot)

    def write(self, page: StoredPage, slot: int) -> bool:
        self._world.check_is_stored(slot, page.key, "is written to the disk")
        is_taken = self._tier.write(page, slot)
        if is_taken:
            self.in_flight.append(DiskTransfer(page, slot, False))
        return is_taken

    def take_ended(self) -> Sequence[EndedTransfer]:
        if self.is_busy:
            time.sleep(WAIT_S)
        ended = self._tier.take_ended()
        for transfer in ended:
            (begun,) = [begun for begun in self.in_flight if begun.slot == transfer.slot]
            self.in_flight.remove(begun)
            self._world.counts["read from disk" if begun.is_read else "written to disk"] += transfer.ok
            self._world.counts["failed reads"] += begun.is_read and not transfer.ok
        return ended

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return self._tier.take_changes()

    def purge(self) -> None:
        self._tier.purge()

    @property
    def is_busy(self) -> bool:
        return self.is_purging or not (self._tier.is_loaded or self._tier.stats().is_off)

    @property
    def is_purging(self) -> bool:
        return self._tier.is_purging

    def close(self) -> None:
        self._tier.close()

    def run(self, transfer: DiskTransfer, half: int) -> None:
        """Lets the io threads go on."""
        time.sleep(WAIT_S)

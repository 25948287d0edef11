"""Measures the page store's decisions: CPU time a page, longest turns and memory, of the core alone.

A turn puts a chain of 64 pages, writes into the granted slots, finds another chain and ends the find. Times are CPU
time of the thread, garbage collections included. Every scenario has its own process. Memory includes the keys.
"""

import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import shake_256
from multiprocessing import get_context
from pathlib import Path

from benchmarks.rows import Row, argument_parser, report
from tandem.messages import PROTOCOL_VERSION, PageFormat
from tandem.pagestore.keys import KEY_BYTES
from tandem.pagestore.messages import DISK, EndFind, Find, Purge, Put, PutGranted, StoreHello, Wrote
from tandem.pagestore.server.base import EndedTransfer, SlowTier, StoredPage
from tandem.pagestore.server.page_store import PageStore
from tandem.prefix import IDENTITY_BYTES

CHAIN_PAGES = 64
# A found chain is one of so many written last, as a part of the slots.
RECENT_PART = 0.5
NUM_NAMESPACES = 20
NAMESPACE_SHARE = 0.04
TURNS_PER_TAKE = 64
# Writes in flight. Each poll ends them, so the disk keeps up in the long run.
MAX_WRITES = 80

MAX_TURN_MS = 5.0
MAX_PAGE_US = 12.0
MAX_SLOT_BYTES = 400.0
MAX_GROWTH = 1.05


class ForgetfulDisk(SlowTier):
    """Ends every write at the next poll, and keeps nothing."""

    def __init__(self) -> None:
        self._ended: list[EndedTransfer] = []

    def find(self, key: bytes) -> StoredPage | None:
        return None

    def read(self, page: StoredPage, slot: int) -> None:
        raise NotImplementedError

    def write(self, page: StoredPage, slot: int) -> bool:
        if len(self._ended) == MAX_WRITES:
            return False
        self._ended.append(EndedTransfer(page, slot, True))
        return True

    def take_ended(self) -> Sequence[EndedTransfer]:
        ended, self._ended = self._ended, []
        return ended

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        return (), ()

    def purge(self) -> None: ...

    def close(self) -> None: ...


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Churn:
    """Turns of one worker.

    Attributes:
        longest_s, longest_take_s: CPU time of the longest turn, and of the longest call of take_changes.
        total_s: CPU time of all turns.
        num_turns: turns done.
    """

    def __init__(self, num_slots: int, *, has_quotas_and_disk: bool = False) -> None:
        tiers = [(DISK, ForgetfulDisk())] if has_quotas_and_disk else []
        share = NAMESPACE_SHARE if has_quotas_and_disk else 1.0
        self.store = PageStore(num_slots, time.monotonic, tiers, max_namespace_share=share)
        self.store.open_session(
            "worker", StoreHello(PROTOCOL_VERSION, "w", "life", 1, PageFormat("f", 4096, "layout")), lambda: False
        )
        self.store.take_outgoing()
        self.num_turns = 0
        self._num_recent = max(int(num_slots * RECENT_PART) // CHAIN_PAGES, 1)
        self._random = random.Random(0)
        self.reset()

    def reset(self) -> None:
        self.longest_s = self.longest_take_s = self.total_s = 0.0

    def run(self, num_turns: int) -> None:
        for _ in range(num_turns):
            put, put_again = self._put(self.num_turns), self._put(self._recent())
            find = Find(self.num_turns, put_again.keys)
            elapsed = cpu_time(partial(self._turn, put, find))
            self.longest_s, self.total_s = max(self.longest_s, elapsed), self.total_s + elapsed
            self.num_turns += 1
            if self.num_turns % TURNS_PER_TAKE == 0:
                self.longest_take_s = max(self.longest_take_s, cpu_time(self.store.take_changes))

    def _turn(self, put: Put, find: Find) -> None:
        store = self.store
        store.receive("worker", put)
        (granted,) = store.take_outgoing()["worker"]
        assert isinstance(granted, PutGranted)
        grants = [pair for pair in zip(granted.slots, granted.generations, strict=True) if pair[0] >= 0]
        store.receive("worker", Wrote(tuple(slot for slot, _ in grants), tuple(number for _, number in grants)))
        store.receive("worker", find)
        store.take_outgoing()
        store.receive("worker", EndFind(find.number))
        store.poll()

    def _recent(self) -> int:
        return max(self.num_turns - 1 - self._random.randrange(self._num_recent), 0)

    def _put(self, number: int) -> Put:
        digest = shake_256(number.to_bytes(8, "little")).digest(CHAIN_PAGES * KEY_BYTES)
        keys = tuple(digest[start : start + KEY_BYTES] for start in range(0, len(digest), KEY_BYTES))
        identities = tuple(key[-IDENTITY_BYTES:] for key in keys)
        return Put(number, f"namespace {number % NUM_NAMESPACES}", b"", keys, identities)


def cpu_time(act: Callable[[], object]) -> float:
    start = time.thread_time()
    act()
    return time.thread_time() - start


def measure(num_slots: int, has_quotas_and_disk: bool) -> list[Row]:
    """Fills the store, replaces all its pages, purges it and fills it again."""
    name = f"{num_slots:,} slots" + (", quotas and disk" if has_quotas_and_disk else "")
    before = resident_bytes()
    churn = Churn(num_slots, has_quotas_and_disk=has_quotas_and_disk)
    num_turns = num_slots // CHAIN_PAGES + 1
    rows = []

    def add(what: str, value: float, unit: str, high: float | None = None) -> None:
        rows.append(Row(f"{name}: {what}", value, unit, high=high))

    def run(what: str) -> None:
        churn.reset()
        churn.run(num_turns)
        add(f"{what}, CPU time a page", churn.total_s / num_turns / CHAIN_PAGES * 1e6, "us", MAX_PAGE_US)
        add(f"{what}, longest turn", churn.longest_s * 1e3, "ms", MAX_TURN_MS)
        add(f"{what}, longest take_changes", churn.longest_take_s * 1e3, "ms", 2 * MAX_TURN_MS)

    run("filling")
    add("memory a slot", (resident_bytes() - before) / num_slots, "bytes", MAX_SLOT_BYTES)
    add("full garbage collection", cpu_time(gc.collect) * 1e3, "ms")
    run("evicting")
    add("Purge", cpu_time(lambda: churn.store.receive("worker", Purge())) * 1e3, "ms", 2 * MAX_TURN_MS)
    run("filling after Purge")
    assert churn.store.check_integrity() == ""
    return rows


def measure_growth(num_slots: int, num_pages: int) -> list[Row]:
    """Replaces pages again and again: the memory stays as it was after the first tenth."""
    churn = Churn(num_slots)
    churn.run(num_pages // 10 // CHAIN_PAGES)
    first = resident_bytes()
    churn.run(num_pages * 9 // 10 // CHAIN_PAGES)
    name = f"{num_slots:,} slots, {num_pages:,} pages"
    return [
        Row(f"{name}: memory after a tenth", first / 1e6, "MB"),
        Row(f"{name}: memory at the end / after a tenth", resident_bytes() / first, "", high=MAX_GROWTH),
        Row(f"{name}: longest turn", churn.longest_s * 1e3, "ms", high=MAX_TURN_MS),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--slots", type=int, default=1_000_000, help="slots of the large store (%(default)s)")
    parser.add_argument("--pages", type=int, default=10_000_000, help="pages of the long run (%(default)s)")
    arguments = parser.parse_args(argv)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        parts = [
            processes.submit(measure, arguments.slots, False),
            processes.submit(measure, arguments.slots, True),
            processes.submit(measure_growth, arguments.slots // 10, arguments.pages),
        ]
        rows = [row for part in parts for row in part.result()]
    return report(rows, "page store, core", arguments.json)


if __name__ == "__main__":
    sys.exit(main())

"""Copies between a pool and the store's region, beside plain copies of the same bytes."""

import random
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.rows import Row
from tandem.engine.kvcache.base import Completion
from tandem.pagestore.client.base import RegionCopies
from tandem.timer_slack import sleep_exactly

# As a worker copies: at most this many pages at once, and the next ones submitted behind them.
_BATCH_PAGES = 64
_IN_FLIGHT = 2
_ROUNDS = 7
_POLL_S = 0.0002
MIN_SHARE = 0.9


class Ends(ABC):
    """Two memories and their copies. Attributes: page_bytes; num_pages: of the pool and of the region."""

    page_bytes: int
    num_pages: int
    copies: RegionCopies

    @abstractmethod
    def plain_out(self) -> float:
        """Return the seconds of a copy of num_pages from device to host memory, in order."""

    @abstractmethod
    def plain_in(self) -> float: ...

    def rows(self) -> list[Row]:
        """Return further figures."""
        return []

    def close(self) -> None:
        self.copies.close()


class CpuEnds(Ends):
    """The plain copy is memcpy page by page: for one large copy, libc bypasses the cache and is twice as fast."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        from tandem.pagestore.client.cpu_copies import CpuRegionCopies

        self.page_bytes, self.num_pages = page_bytes, num_pages
        pool, region = (np.ones((num_pages, page_bytes), np.uint8) for _ in range(2))
        self._pool, self._region = pool, region
        self.copies = CpuRegionCopies(pool, region)

    def plain_out(self) -> float:
        return _seconds_of(lambda: self._copy_pages(self._pool, self._region))

    def plain_in(self) -> float:
        return _seconds_of(lambda: self._copy_pages(self._region, self._pool))

    def _copy_pages(self, source: np.ndarray, destination: np.ndarray) -> None:
        for page in range(self.num_pages):
            destination[page] = source[page]


def measure_copies(ends: Ends) -> list[Row]:
    """Rounds of all kinds take turns, because rates drift."""
    seconds: dict[str, list[float]] = {}
    half = ends.num_pages // 2
    for number in range(_ROUNDS + 1):
        rng = random.Random(number)
        pages, slots = (rng.sample(range(ends.num_pages), ends.num_pages) for _ in range(2))
        all_out, all_in = [_Way(ends.copies.copy_out, pages, slots)], [_Way(ends.copies.copy_in, slots, pages)]
        # Halves twice: as many bytes each way as alone, and no page is read and written at once.
        both = [
            _Way(ends.copies.copy_out, pages[:half] * 2, slots[:half] * 2),
            _Way(ends.copies.copy_in, slots[half:] * 2, pages[half:] * 2),
        ]
        took = {
            "plain out": ends.plain_out(),
            "out": _run(all_out),
            "plain in": ends.plain_in(),
            "in": _run(all_in),
            "both": _run(both),
        }
        # The first round is the first to touch the memories.
        for name, value in took.items() if number else ():
            seconds.setdefault(name, []).append(value)
    gigabytes = ends.num_pages * ends.page_bytes / 1e9
    rates = {name: gigabytes / statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, way in (("out", "pool to store"), ("in", "store to pool")):
        rows += [
            Row(f"{way}, plain copy", rates[f"plain {name}"], "GB/s"),
            Row(f"{way}, scattered pages", rates[name], "GB/s", low=MIN_SHARE * rates[f"plain {name}"]),
        ]
    return [*rows, Row("both ways at once, each way", rates["both"], "GB/s")]


class _Way:
    """Copies in one direction, in batches, some of them submitted ahead."""

    def __init__(
        self, start: Callable[[Sequence[int], Sequence[int]], Completion], src: Sequence[int], dst: Sequence[int]
    ) -> None:
        self._start = start
        self._batches = deque(
            (src[at : at + _BATCH_PAGES], dst[at : at + _BATCH_PAGES]) for at in range(0, len(src), _BATCH_PAGES)
        )
        self._running: deque[Completion] = deque()

    def go_on(self) -> bool:
        """Return whether copies are left."""
        while self._running and self._running[0].done():
            self._running.popleft()
        while self._batches and len(self._running) < _IN_FLIGHT:
            self._running.append(self._start(*self._batches.popleft()))
        return bool(self._running)


def _run(ways: Sequence[_Way]) -> float:
    """Return the seconds until all copies have ended."""
    sleep_exactly()
    began = time.perf_counter()
    while sum(way.go_on() for way in ways):
        time.sleep(_POLL_S)
    return time.perf_counter() - began


def _seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

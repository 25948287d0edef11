"""Copies between a pool in host memory and the region, in one thread for each direction."""

import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.engine.kvcache.base import Completion
from tandem.pagestore.client.base import RegionCopies


class _Copied:
    """Set by the copying thread, read by others."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error = ""

    def end(self, error: str = "") -> None:
        self._error = error
        self._event.set()

    def done(self) -> bool:
        if not self._event.is_set():
            return False
        if self._error:
            raise RuntimeError(self._error)
        return True


class _Copy(NamedTuple):
    sources: Sequence[int]
    destinations: Sequence[int]
    copied: _Copied


class _Direction:
    """Copies rows of one array to rows of another, in order. NumPy copies a page without the interpreter's lock."""

    def __init__(self, name: str, source: np.ndarray, destination: np.ndarray) -> None:
        self._source = source
        self._destination = destination
        # None ends the thread.
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def start(self, sources: Sequence[int], destinations: Sequence[int]) -> Completion:
        assert len(sources) == len(destinations)
        copied = _Copied()
        self._queue.put(_Copy(tuple(sources), tuple(destinations), copied))
        return copied

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (copy := self._queue.get()) is not None:
            try:
                for source, destination in zip(copy.sources, copy.destinations, strict=True):
                    self._destination[destination] = self._source[source]
            except Exception as error:
                copy.copied.end(f"a copy between pool and region failed: {error!r}")
            else:
                copy.copied.end()


class CpuRegionCopies(RegionCopies):
    def __init__(self, pool: np.ndarray, region: np.ndarray) -> None:
        """
        Args:
            pool: (num_pages, page_bytes) uint8.
            region: (num_slots, page_bytes) uint8.
        """
        assert pool.shape[1] == region.shape[1]
        self._out = _Direction("copy-out", pool, region)
        self._in = _Direction("copy-in", region, pool)

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> Completion:
        # An engine on a CPU returns from a launch when its pages are written.
        return self._out.start(page_ids, slots)

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> Completion:
        return self._in.start(slots, page_ids)

    def close(self) -> None:
        self._out.close()
        self._in.close()

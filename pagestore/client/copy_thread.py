import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tandem.pagestore.client.base import RegionCopies, RegionCopy

# Limit on all copies at the end, in seconds.
CLOSE_S = 30.0


class _Copied:
    """Set by the copying thread, read by others."""

    def __init__(self) -> None:
        self._has_run = threading.Event()
        self._completion: RegionCopy | None = None
        self._seconds = 0.0
        self._error = ""

    def has_run(self, completion: RegionCopy | None, seconds: float) -> None:
        self._completion, self._seconds = completion, seconds
        self._has_run.set()

    def failed(self, error: str) -> None:
        self._error = error
        self._has_run.set()

    def done(self) -> bool:
        if not self._has_run.is_set():
            return False
        if self._error:
            raise RuntimeError(self._error)
        return self._completion is None or self._completion.done()

    @property
    def seconds(self) -> float:
        return self._seconds if self._completion is None else self._completion.seconds


class _Copy(NamedTuple):
    sources: Sequence[int]
    destinations: Sequence[int]
    copied: _Copied


class CopyDirection(Protocol):
    def start(self, sources: Sequence[int], destinations: Sequence[int], /) -> RegionCopy: ...

    def close(self) -> None:
        """Waits for all copies. Raises RuntimeError: one does not end."""


class TwoWayCopies(RegionCopies):
    """Copies of two directions that do not wait for each other."""

    def __init__(self, out: CopyDirection, into: CopyDirection) -> None:
        self._out = out
        self._in = into

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        return self._out.start(page_ids, slots)

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> RegionCopy:
        return self._in.start(slots, page_ids)

    def close(self) -> None:
        self._out.close()
        self._in.close()


class CopyThread:
    """Runs the copies of one direction in order, away from the engine thread."""

    def __init__(self, name: str, copy: Callable[[Sequence[int], Sequence[int]], RegionCopy | None]) -> None:
        """
        Args:
            copy: copies between sources and destinations. Returns the end of the copies that it has only begun; None:
                they have ended.
        """
        self._copy = copy
        # None ends the thread.
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def start(self, sources: Sequence[int], destinations: Sequence[int]) -> RegionCopy:
        assert len(sources) == len(destinations)
        copied = _Copied()
        self._queue.put(_Copy(tuple(sources), tuple(destinations), copied))
        return copied

    def close(self) -> None:
        """Runs all copies and ends the thread.

        Raises:
            RuntimeError: they take longer than CLOSE_S.
        """
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise RuntimeError(f"copies between pool and region do not end within {CLOSE_S:.0f} s")

    def _main(self) -> None:
        while (copy := self._queue.get()) is not None:
            began = time.monotonic()
            try:
                completion = self._copy(copy.sources, copy.destinations)
            except Exception as error:
                copy.copied.failed(f"a copy between pool and region failed: {error!r}")
            else:
                copy.copied.has_run(completion, time.monotonic() - began)

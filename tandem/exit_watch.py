"""Detects the exit of a process that may write to memory of others."""

import time
from collections.abc import Iterable, Sequence
from typing import Self

from tandem.processes import ProcessId

# Time from the exit to the reuse of the memory, in seconds: submitted copies have landed by then.
SETTLE_S = 0.2
# Minimum interval between checks, in seconds: every leased page asks in every step.
LOOK_INTERVAL_S = 0.01


class ExitWatch:
    """Watches one process of this host."""

    def __init__(self, process: ProcessId | None) -> None:
        """Args: process: was seen alive; None: it was not, and so cannot be seen to exit."""
        self._process = process
        self._gone_since: float | None = None
        self._next_look = 0.0

    @classmethod
    def of(cls, pid: int) -> Self:
        """Watches the process that has `pid` now."""
        try:
            process = ProcessId.of(pid)
        except ProcessLookupError:
            return cls(None)
        return cls(process if process.is_alive() else None)

    def is_gone(self) -> bool:
        """Returns whether the process has exited and SETTLE_S have passed since."""
        if self._process is None:
            return False
        now = time.monotonic()
        if self._gone_since is None:
            if now < self._next_look:
                return False
            self._next_look = now + LOOK_INTERVAL_S
            if self._process.is_alive():
                return False
            self._gone_since = now
        return now - self._gone_since >= SETTLE_S


class ExitWatches:
    """Watches several processes, at least one."""

    def __init__(self, watches: Sequence[ExitWatch]) -> None:
        self._watches = watches

    @classmethod
    def of(cls, pids: Iterable[int]) -> Self:
        return cls([ExitWatch.of(pid) for pid in pids])

    def are_gone(self) -> bool:
        """Returns whether all have exited and SETTLE_S have passed since the last one did."""
        # Look at each, so that their times pass together.
        gone = [watch.is_gone() for watch in self._watches]
        return all(gone)

"""Whether the process at the other end of a link has exited, and cannot write this worker's pages any more."""

import time

from tandem.processes import ProcessId

# Leased pages are reused so long after their sender's exit was seen: what it had submitted last has landed by then.
SETTLE_S = 0.2
# The process is looked for so often at most: every page that it leased here asks at every step.
LOOK_INTERVAL_S = 0.01


class ExitWatch:
    """Watches one process of this host."""

    def __init__(self, pid: int) -> None:
        try:
            process = ProcessId.of(pid)
        except ProcessLookupError:
            process = None
        # One that was never seen alive from here cannot be seen to end either.
        self._process = process if process is not None and process.is_alive() else None
        self._gone_since: float | None = None
        self._next_look = 0.0

    def is_gone(self) -> bool:
        """Whether it has exited, and SETTLE_S have passed since that was seen."""
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

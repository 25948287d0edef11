"""Whether the process at the other end of a link has exited, and cannot write this worker's pages any more."""

import time

from tandem.processes import ProcessId

# Leased pages are reused so long after their sender's exit was seen: what it had submitted last has landed by then.
SETTLE_S = 0.2


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

    def is_gone(self) -> bool:
        """Whether it has exited, and SETTLE_S have passed since that was seen."""
        if self._process is None:
            return False
        if self._gone_since is None:
            if self._process.is_alive():
                return False
            self._gone_since = time.monotonic()
        return time.monotonic() - self._gone_since >= SETTLE_S

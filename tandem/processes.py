"""Processes of this host, from /proc (Linux)."""

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessStat:
    """Attributes: is_zombie: no thread of it runs; start_time: in clock ticks since boot."""

    parent: int
    start_time: int
    is_zombie: bool


@dataclass(frozen=True, order=True)
class ProcessId:
    """A process, distinguished from a later one with the same pid by its start time."""

    pid: int
    start_time: int
    """Clock ticks from boot to the process's start."""

    @staticmethod
    def of(pid: int) -> "ProcessId":
        """Return the current process with `pid`. Raises ProcessLookupError."""
        stat = read_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no process has pid {pid}")
        return ProcessId(pid, stat.start_time)

    def age_s(self) -> float:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_time / os.sysconf("SC_CLK_TCK"))

    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie does not."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start_time == self.start_time and not stat.is_zombie


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of the process that has `pid` now, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field, the program's name in brackets, may contain brackets and spaces.
    state, parent, *rest = text.rpartition(")")[2].split()
    threads, start_time = int(rest[15]), int(rest[17])
    # While other threads live, a dead main thread looks like a zombie.
    return ProcessStat(int(parent), start_time, is_zombie=state in "ZX" and threads <= 1)

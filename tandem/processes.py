"""Processes of this host, as /proc tells of them (Linux)."""

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessStat:
    """Attributes: is_zombie: whether nothing of it runs any more; start_time: in ticks since boot."""

    parent: int
    start_time: int
    is_zombie: bool


@dataclass(frozen=True, order=True)
class ProcessId:
    """A process, told apart from a later one that got the same pid by when it started."""

    pid: int
    start_time: int
    """Clock ticks from boot to the process's start."""

    @staticmethod
    def of(pid: int) -> "ProcessId":
        """The process that has `pid` now; ProcessLookupError when there is none."""
        stat = read_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no process has pid {pid}")
        return ProcessId(pid, stat.start_time)

    def age_s(self) -> float:
        """Seconds since its start."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_time / os.sysconf("SC_CLK_TCK"))

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        stat = read_stat(self.pid)
        return stat is not None and stat.start_time == self.start_time and not stat.is_zombie


def read_stat(pid: int) -> ProcessStat | None:
    """What /proc says of the process that has `pid` now; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in brackets and may itself hold brackets and spaces.
    state, parent, *rest = text.rpartition(")")[2].split()
    threads, start_time = int(rest[15]), int(rest[17])
    # With threads left beside it, a dead main thread looks like a zombie while its memory is still in use.
    return ProcessStat(int(parent), start_time, is_zombie=state in "ZX" and threads <= 1)

"""Processes that the kernel killed for memory, counted by the kernel."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

# A container's own count (cgroup 2, then 1), or the host's.
_FILES = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)
_KEY = "oom_kill"
LOOK_INTERVAL_S = 2.0
# Older kills explain no death that is noticed now.
RECENT_S = 10.0


class MemoryKills:
    """Tells kills since the last explanation. Other processes of this host or container count too.

    An owner that lives long calls `look` often; kills older than RECENT_S then explain nothing.
    """

    def __init__(self, files: Sequence[Path] = _FILES, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        # Times and counts, oldest first. All but the first are recent.
        self._looks = deque([(clock(), self._count())])

    def look(self) -> None:
        """Reads the count, at most once in LOOK_INTERVAL_S."""
        now = self._clock()
        if now >= self._looks[-1][0] + LOOK_INTERVAL_S:
            self._looks.append((now, self._count()))
        while len(self._looks) > 1 and self._looks[1][0] <= now - RECENT_S:
            self._looks.popleft()

    def explanation(self) -> str:
        """Returns a remark for a process that just died, or "": no process was killed for memory."""
        num_kills = self._count()
        num_new = num_kills - self._looks[0][1]
        self._looks = deque([(self._clock(), num_kills)])
        if num_new <= 0:
            return ""
        killed = "a process" if num_new == 1 else f"{num_new} processes"
        return (
            f"the kernel has just killed {killed} here for memory (SIGKILL, {_KEY} {num_kills}): use a smaller model, "
            "a smaller --num-pages or fewer workers, or raise the container's limit"
        )

    def _count(self) -> int:
        for file in self._files:
            with suppress(OSError, ValueError):
                for line in file.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == _KEY:
                        return int(value)
        return 0

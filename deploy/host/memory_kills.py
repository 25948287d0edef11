"""Processes that the kernel killed for memory, counted by the kernel."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# A container's own count (cgroup 2, then 1), or the host's.
_FILES = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)
_KEY = "oom_kill"


class MemoryKills:
    """Tells kills since the last look. Other processes of this host or container count too."""

    def __init__(self, files: Sequence[Path] = _FILES) -> None:
        self._files = files
        self._num_seen = self._count()

    def explanation(self) -> str:
        """Returns a remark for a process that just died, or "": no process was killed for memory."""
        num_kills = self._count()
        num_new, self._num_seen = num_kills - self._num_seen, num_kills
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

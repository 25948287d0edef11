from contextlib import suppress
from pathlib import Path


def available_memory_bytes() -> int:
    """Bytes available to a new allocation in this host or container, including kernel caches."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        fields[key] = int(rest.split()[0]) * 1024
    available = fields["MemAvailable"]
    # A container's limit (cgroup 2).
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, limit - used)
    return max(0, available)

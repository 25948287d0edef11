"""Pins a worker to the CPUs local to its GPU."""

import os
from collections.abc import Collection
from pathlib import Path

SYSFS = Path("/sys")
# A worker runs four threads at once: fewer CPUs cost more than remote memory.
MIN_CPUS = 4


def run_beside(pci_id: str, sysfs: Path = SYSFS, min_cpus: int = MIN_CPUS) -> str:
    """Pins all threads of this process to the CPUs local to a device. Returns a line for the log.

    Args:
        pci_id: domain:bus:device.function.
        min_cpus: with fewer local CPUs, the affinity stays as it is.
    """
    allowed = os.sched_getaffinity(0)
    chosen = cpus_beside(pci_id, allowed, sysfs)
    if not chosen:
        return f"runs on all of its {len(allowed)} CPUs: the host names none of them that are nearer to {pci_id}"
    if len(chosen) < min_cpus:
        return f"runs on all of its {len(allowed)} CPUs: only {len(chosen)} of them are beside {pci_id}"
    pinned = set[int]()
    # New threads inherit the affinity of their parent, so repeat until no thread is left.
    while threads := {int(thread.name) for thread in Path("/proc/self/task").iterdir()} - pinned:
        for thread in threads:
            try:
                os.sched_setaffinity(thread, chosen)
            except ProcessLookupError:
                pass
            except OSError as error:
                # The container may forbid it, or has lost CPUs.
                return f"cannot be kept to the CPUs beside {pci_id}: {error.strerror}"
        pinned |= threads
    return f"runs on CPUs {_as_list(chosen)} of its {len(allowed)}, which are beside {pci_id}"


def cpus_beside(pci_id: str, allowed: Collection[int], sysfs: Path = SYSFS) -> set[int]:
    """Returns the allowed CPUs local to a device; empty if the host names none, or all of them."""
    domain, _, rest = pci_id.lower().partition(":")
    # NVIDIA's tools write domains with eight digits, the kernel with four.
    name = f"{int(domain, 16):04x}:{rest}"
    try:
        beside = _parsed((sysfs / "bus/pci/devices" / name / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()
    chosen = beside & set(allowed)
    return set() if len(chosen) == len(allowed) else chosen


def _parsed(cpu_list: str) -> set[int]:
    """Parses the kernel's format, "0-15,32-47". Raises ValueError."""
    cpus = set[int]()
    for part in cpu_list.strip().split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _as_list(cpus: Collection[int]) -> str:
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)

"""Which CPUs a worker runs on: those beside its GPU, where the host says which these are."""

import os
from collections.abc import Collection
from pathlib import Path

SYSFS = Path("/sys")
# A worker's two threads, those of a transport and of grammars run at the same time: fewer would cost more than memory
# that is further away. A container's own CPUs may be next to all on the other side.
MIN_CPUS = 4


def run_beside(pci_id: str, sysfs: Path = SYSFS, min_cpus: int = MIN_CPUS) -> str:
    """Keeps this process, with all the threads that it has, to those of its CPUs that are beside a device. Says what it
    did, for the log.

    Args:
        pci_id: domain:bus:device.function, as drivers write it.
        min_cpus: if fewer are beside it, the process keeps all that it has.
    """
    allowed = os.sched_getaffinity(0)
    chosen = cpus_beside(pci_id, allowed, sysfs)
    if not chosen:
        return f"runs on all of its {len(allowed)} CPUs: the host names none of them that are nearer to {pci_id}"
    if len(chosen) < min_cpus:
        return f"runs on all of its {len(allowed)} CPUs: only {len(chosen)} of them are beside {pci_id}"
    pinned = set[int]()
    # Whichever thread starts another meanwhile passes on what it may use itself.
    while threads := {int(thread.name) for thread in Path("/proc/self/task").iterdir()} - pinned:
        for thread in threads:
            try:
                os.sched_setaffinity(thread, chosen)
            except ProcessLookupError:
                pass
            except OSError as error:
                # A container may forbid it, or have lost CPUs meanwhile.
                return f"cannot be kept to the CPUs beside {pci_id}: {error.strerror}"
        pinned |= threads
    return f"runs on CPUs {_as_list(chosen)} of its {len(allowed)}, which are beside {pci_id}"


def cpus_beside(pci_id: str, allowed: Collection[int], sysfs: Path = SYSFS) -> set[int]:
    """Those of the CPUs that are beside a device; none if the host does not say, or names all of them, or none."""
    domain, _, rest = pci_id.lower().partition(":")
    # The NVIDIA tools write domains with eight digits, the kernel with four.
    name = f"{int(domain, 16):04x}:{rest}"
    try:
        beside = _parsed((sysfs / "bus/pci/devices" / name / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()
    chosen = beside & set(allowed)
    return set() if len(chosen) == len(allowed) else chosen


def _parsed(cpu_list: str) -> set[int]:
    """Of a list as the kernel writes it: "0-15,32-47". Raises ValueError for anything else."""
    cpus = set[int]()
    for part in cpu_list.strip().split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _as_list(cpus: Collection[int]) -> str:
    """As the kernel writes it."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)

"""Finds and ends the descendants of a process (Linux).

psutil's `wait_procs` waits for zombies that another parent does not reap, its `children` fails with hidepid=1, and its
`send_signal` can hit a reused pid.
"""

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tandem.processes import ProcessId, read_stat

_POLL_S = 0.02
# A killed process needs time to free its memory.
_KILL_WAIT_S = 3.0


def descendants(root_pid: int | None = None) -> list[ProcessId]:
    """Returns the living descendants of a process (default: this one), oldest first."""
    children = defaultdict[int, list[ProcessId]](list)
    for entry in Path("/proc").iterdir():
        stat = read_stat(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and not stat.is_zombie:
            children[stat.parent].append(ProcessId(int(entry.name), stat.start_time))
    found: list[ProcessId] = []
    parents = [os.getpid() if root_pid is None else root_pid]
    while parents:
        below = children.pop(parents.pop(), [])
        found += below
        parents += [process.pid for process in below]
    return sorted(found, key=lambda process: (process.start_time, process.pid))


def end_processes(processes: Iterable[ProcessId], grace_s: float) -> list[ProcessId]:
    """Returns the processes still alive after SIGTERM and, after `grace_s`, SIGKILL."""
    left = list(processes)
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        for process in left:
            send_signal(process, signum)
        deadline = time.monotonic() + wait_s
        left = [process for process in left if not _has_ended(process)]
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = [process for process in left if not _has_ended(process)]
    return left


def end_descendants(grace_s: float) -> list[ProcessId]:
    """Returns the descendants still alive. Only a subreaper finds orphans."""
    deadline = time.monotonic() + grace_s
    while left := descendants():
        # Two rounds without grace are enough: the rest is stuck or keeps forking.
        if time.monotonic() > deadline + 2 * _KILL_WAIT_S:
            break
        end_processes(left, max(0.0, deadline - time.monotonic()))
    return left


def send_signal(process: ProcessId, signum: signal.Signals) -> None:
    """Signals a process, but not another one with its reused pid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # The open descriptor stays bound to one process, so the check holds until the signal is sent.
            if ProcessId.of(process.pid) == process:
                signal.pidfd_send_signal(descriptor, signum)
        finally:
            os.close(descriptor)


def _has_ended(process: ProcessId) -> bool:
    if process.is_alive():
        return False
    # A child or adopted orphan stays a zombie until this process reaps it.
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        if ProcessId.of(process.pid) == process:
            os.waitpid(process.pid, os.WNOHANG)
    return True

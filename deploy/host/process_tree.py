"""Finding and ending the processes that descend from one of ours (Linux)."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from tandem.processes import ProcessId, read_stat

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_POLL_S = 0.02
# A killed process needs a moment to give its memory back; one stuck in the kernel never ends.
_KILL_WAIT_S = 3.0


def descendants(root_pid: int | None = None) -> list[ProcessId]:
    """Every living descendant of a process (by default this one), itself excluded, oldest first."""
    children: dict[int, list[ProcessId]] = {}
    for entry in Path("/proc").iterdir():
        stat = read_stat(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and not stat.is_zombie:
            children.setdefault(stat.parent, []).append(ProcessId(int(entry.name), stat.start_time))
    found: list[ProcessId] = []
    parents = [os.getpid() if root_pid is None else root_pid]
    while parents:
        below = children.pop(parents.pop(), [])
        found += below
        parents += [process.pid for process in below]
    return sorted(found, key=lambda process: (process.start_time, process.pid))


def end_processes(processes: Iterable[ProcessId], grace_s: float) -> list[ProcessId]:
    """Ends processes with SIGTERM and, after `grace_s`, SIGKILL; returns those that live all the same.

    Children of this process that have ended are reaped.
    """
    left = list(processes)
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        for process in left:
            send_signal(process, signum)
        deadline = time.monotonic() + wait_s
        left = [process for process in left if not _is_over(process)]
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = [process for process in left if not _is_over(process)]
    return left


def end_descendants(grace_s: float) -> list[ProcessId]:
    """Ends every descendant of this process, those started meanwhile too; returns those that live all the same.

    Only a subreaper finds the descendants whose parents ended before.
    """
    deadline = time.monotonic() + grace_s
    while left := descendants():
        # Past the deadline a round has no grace; what appears two rounds on is stuck, or multiplies.
        if time.monotonic() > deadline + 2 * _KILL_WAIT_S:
            break
        end_processes(left, max(0.0, deadline - time.monotonic()))
    return left


def send_signal(process: ProcessId, signum: signal.Signals) -> None:
    """Signals a process if it is still the one that started then; else does nothing."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(process.pid)
        try:
            # This is checked with the descriptor open: from here on it cannot come to mean another process.
            stat = read_stat(process.pid)
            if stat is not None and stat.start_time == process.start_time:
                signal.pidfd_send_signal(descriptor, signum)
        finally:
            os.close(descriptor)


def become_subreaper() -> None:
    """Makes this process the parent of every descendant whose own parent ends, in place of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: signal.Signals) -> None:
    """Has the kernel send this process `signum` when the thread that forked it ends.

    A parent that ended before the call goes unnoticed, so the caller looks at os.getppid() afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _is_over(process: ProcessId) -> bool:
    if process.is_alive():
        return False
    stat = read_stat(process.pid)
    # An adopted orphan that ended stays a zombie until this process asks for its status.
    if stat is not None and stat.start_time == process.start_time and stat.parent == os.getpid():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
    return True

"""Folders of Ray's sessions, which Ray never removes: ours go after their end, and logs of dead processes too."""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections import defaultdict
from pathlib import Path
from typing import TextIO

from tandem.deploy.on_ray.ray_probe import node_is_up
from tandem.processes import read_stat

# Locked by the launcher while its Ray runs: pids of another container mean other processes, locks do not.
MARK = "tandem.lock"
# Without a mark: of an earlier version, of a start that failed, or of one that goes on.
UNMARKED_AGE_S = 3600.0
# Read after a crash and a new start.
NUM_KEPT_SESSIONS = 1
# Ended processes whose logs are kept, per session.
NUM_KEPT_PROCESSES = 32
_LOG_OF_PROCESS = re.compile(
    r"(?:python-core-worker-[0-9a-f]+_|worker-[0-9a-f]+-[0-9a-f]+-|event_CORE_WORKER_)(\d+)\.(?:log|out|err)(?:\.\d+)?"
)


def mark_session(session: Path) -> TextIO:
    """Marks a session as ours, in use until the returned file is closed. Raises OSError."""
    mark = (session / MARK).open("w")
    fcntl.flock(mark, fcntl.LOCK_SH)
    return mark


def remove_ended_sessions(directory: Path, *, are_all_ours: bool) -> None:
    """Removes folders of ended sessions, but the newest.

    Args:
        directory: Ray's temporary directory.
        are_all_ours: no other program's Ray uses the directory, so that folders without a mark are ours too.
    """
    sessions = sorted(directory.glob("session_2*"), reverse=True)
    ended = [session for session in sessions if _is_ours(session) and _has_ended(session, are_all_ours)]
    for session in ended[NUM_KEPT_SESSIONS:]:
        # Another start may be removing it too.
        shutil.rmtree(session, ignore_errors=True)


def remove_old_logs(logs: Path) -> None:
    """Removes the logs of a session's ended processes, but those of the last ones. Args: logs: the session's."""
    by_pid: defaultdict[int, list[Path]] = defaultdict(list)
    for path in (*logs.glob("*"), *(logs / "events").glob("*")):
        if found := _LOG_OF_PROCESS.fullmatch(path.name):
            by_pid[int(found[1])].append(path)
    ended = [paths for pid, paths in by_pid.items() if read_stat(pid) is None]
    with contextlib.suppress(FileNotFoundError):
        ended.sort(key=lambda paths: max(path.stat().st_mtime for path in paths), reverse=True)
        for path in (path for paths in ended[NUM_KEPT_PROCESSES:] for path in paths):
            path.unlink()


def _is_ours(session: Path) -> bool:
    """Returns whether it is a folder, not a link, of this user."""
    with contextlib.suppress(OSError):
        found = session.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _has_ended(session: Path, are_all_ours: bool) -> bool:
    try:
        # Left over by a killed launcher, until the next start of a cluster ends it.
        if any(node_is_up(str(path)) for path in (session / "sockets").glob("raylet*")):
            return False
        with (session / MARK).open("r+") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return are_all_ours and time.time() - session.stat().st_mtime > UNMARKED_AGE_S
        return False
    except OSError:
        return False

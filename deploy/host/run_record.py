"""Records of running clusters, so that the next start can end what a killed one left behind.

A guard and a launcher (see tandem.deploy.host.guard) clean up after each other; only when both are killed at the same
moment do processes stay. Their record tells a later start which ones.
"""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.processes import ProcessId

_END_GRACE_S = 2.0


@dataclass(frozen=True)
class RunOwner:
    """The two processes of ours that a running cluster belongs to."""

    guard: ProcessId
    launcher: ProcessId

    @staticmethod
    def of_launcher() -> "RunOwner":
        """The owner of the run whose launcher calls this."""
        return RunOwner(guard=ProcessId.of(os.getppid()), launcher=ProcessId.of(os.getpid()))


@dataclass(frozen=True)
class RunAbout:
    """What commands are told of a cluster that runs here.

    Attributes:
        name: of the cluster.
        state: "starting", "serving" or "stopping".
        grpc, http: the clients' ports, each "host:port"; "" before they are known.
        log: the file with what it says to whoever started it; "": a terminal has it.
        log_dir: where its processes write their logs; "": Ray knows.
        stop_limit_s: how long stopping it takes at most.
    """

    name: str
    state: str = "starting"
    grpc: str = ""
    http: str = ""
    log: str = ""
    log_dir: str = ""
    stop_limit_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """A cluster with a name that runs on this host."""

    owner: RunOwner
    about: RunAbout
    control_path: Path


def default_directory() -> Path:
    """Where this user's records are kept: the same for every command, whatever session it is run from."""
    return Path(f"/tmp/tandem-{os.getuid()}")


def logs_of_detached(directory: Path, name: str) -> Path:
    """Where the last detached cluster of that name has its logs, or had them. Args: directory: as of the records."""
    return directory / "clusters" / name


def write_record(
    directory: Path, owner: RunOwner, processes: Iterable[ProcessId], about: RunAbout | None = None
) -> Path:
    """Writes or replaces the record of a run, atomically; the directory is made if need be.

    Args:
        about: of a cluster with a name.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    record = {
        "machine": _machine(),
        "guard": _to_json(owner.guard),
        "launcher": _to_json(owner.launcher),
        "processes": [_to_json(process) for process in processes],
        "about": asdict(about) if about is not None else None,
    }
    path = _record_path(directory, owner)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(record))
    draft.replace(path)
    return path


def remove_record(directory: Path, owner: RunOwner) -> None:
    """Removes the record of a run that has stopped; there need not be one."""
    _remove(_record_path(directory, owner))


def end_leftovers(directory: Path) -> list[ProcessId]:
    """Ends what runs without a living guard and launcher left behind, and removes their records and tokens.

    Returns the processes it found alive and set out to end. A record is kept while one of them lives on.
    """
    if not directory.is_dir():
        return []
    check_private(directory)
    found: list[ProcessId] = []
    for path in directory.glob("*.json"):
        # Another start may be at the same work and have removed it.
        with contextlib.suppress(FileNotFoundError):
            found += _end_run(path)
    for path in directory.glob("*.token"):
        with contextlib.suppress(OSError):
            _remove_if_stale(path)
    return found


def find_runs(directory: Path) -> list[Run]:
    """The clusters with names that run here, by their names; those of other containers are not among them.

    Raises:
        PermissionError: somebody else could have written which there are.
    """
    if not directory.is_dir():
        return []
    check_private(directory)
    found = []
    for path in directory.glob("*.json"):
        # It may end meanwhile, or be another version's.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_text())
            owner = RunOwner(_from_json(record["guard"]), _from_json(record["launcher"]))
            if record["machine"] == _machine() and record["about"] and owner.launcher.is_alive():
                found.append(Run(owner, RunAbout(**record["about"]), control_path(directory, owner)))
    return sorted(found, key=lambda run: run.about.name)


def control_path(directory: Path, owner: RunOwner) -> Path:
    """Where a run is spoken to: beside its record, with which it goes."""
    return _record_path(directory, owner).with_suffix(".sock")


def ray_token_path(directory: Path, launcher: ProcessId) -> Path:
    """Where the token of a run's Ray is kept: beside the run's record, with which it goes."""
    return _path_stem(directory, launcher).with_suffix(".token")


def check_private(directory: Path) -> None:
    """Refuses a directory where somebody else could have written which processes to end.

    Raises:
        PermissionError: it is not this user's alone to write to.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{directory} must be a directory, not a link, that belongs to user {os.getuid()} "
            "and that nobody else can write to"
        )


def _end_run(path: Path) -> list[ProcessId]:
    try:
        record = json.loads(path.read_text())
        boot, namespace = record["machine"]
        owners = [_from_json(record["guard"]), _from_json(record["launcher"])]
        processes = [_from_json(item) for item in record["processes"]]
    except (ValueError, KeyError, TypeError):
        _remove(path)
        return []
    this_boot, this_namespace = _machine()
    if boot != this_boot:
        _remove(path)
        return []
    # In another container, pids mean other processes: that record is for a start over there.
    if namespace != this_namespace or any(owner.is_alive() for owner in owners):
        return []
    left = {process for process in processes if process.is_alive()}
    left |= {below for process in left for below in descendants(process.pid)}
    if not end_processes(left, _END_GRACE_S):
        _remove(path)
    return sorted(left)


def _remove_if_stale(token: Path) -> None:
    """Removes a token without a record, if the process that it is named for does not run any more: of a cluster that
    something else than a guarded command had started, such as a test."""
    pid, _, start_time = token.stem.partition("-")
    if not (pid.isdigit() and start_time.isdigit()) or token.with_suffix(".json").exists():
        return
    if ProcessId(int(pid), int(start_time)).is_alive():
        return
    with token.open() as file:
        # The process may be another container's: there pids mean other processes, but a lock is seen from everywhere.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # Whoever has just made it has yet to lock it.
        if os.fstat(file.fileno()).st_size:
            token.unlink()


def _record_path(directory: Path, owner: RunOwner) -> Path:
    return _path_stem(directory, owner.launcher).with_suffix(".json")


def _path_stem(directory: Path, launcher: ProcessId) -> Path:
    return directory / f"{launcher.pid}-{launcher.start_time}"


def _remove(path: Path) -> None:
    """Removes a run's record and what is kept beside it."""
    for suffix in (".draft", ".token", ".sock"):
        path.with_suffix(suffix).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _machine() -> list[str]:
    """What a pid and a start time are relative to."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, str(Path("/proc/self/ns/pid").readlink())]


def _to_json(process: ProcessId) -> list[int]:
    return [process.pid, process.start_time]


def _from_json(item: Any) -> ProcessId:
    pid, start_time = item
    if not (isinstance(pid, int) and isinstance(start_time, int) and pid > 1):
        raise ValueError(f"not a process: {item!r}")
    return ProcessId(pid, start_time)

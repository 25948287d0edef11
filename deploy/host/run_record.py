"""Records of this host's running clusters: if guard and launcher are killed at once, the next start ends leftovers."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.private_directory import check_private
from tandem.processes import ProcessId

logger = logging.getLogger(__name__)

_END_GRACE_S = 2.0
# Of a record. Raise it if other versions would misread one, or could not read it.
FORMAT = 1


class _OtherFormat(Exception):
    """Another version of tandem wrote the record."""


@dataclass(frozen=True)
class RunOwner:
    guard: ProcessId
    launcher: ProcessId

    @staticmethod
    def of_launcher() -> "RunOwner":
        return RunOwner(guard=ProcessId.of(os.getppid()), launcher=ProcessId.of(os.getpid()))


@dataclass(frozen=True)
class RunAbout:
    """A cluster's state, for commands.

    Attributes:
        state: "starting", "serving" or "stopping".
        grpc, http: client addresses, each "host:port"; "" before they are known.
        log: the launcher's output; "": it goes to a terminal.
        log_dir: the processes' logs; "": Ray's own.
        stop_limit_s: longest duration of a stop.
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
    owner: RunOwner
    about: RunAbout
    control_path: Path


def default_directory() -> Path:
    return Path(f"/tmp/tandem-{os.getuid()}")


def logs_of_detached(directory: Path, name: str) -> Path:
    return directory / "clusters" / name


def write_record(
    directory: Path, owner: RunOwner, processes: Iterable[ProcessId], about: RunAbout | None = None
) -> Path:
    """Writes or replaces the record of a run, atomically. Args: about: None: the cluster has no name."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    record = {
        "format": FORMAT,
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
    _remove(_record_path(directory, owner))


def end_leftovers(directory: Path) -> list[ProcessId]:
    """Ends processes of runs whose guard and launcher are dead; removes their records and tokens.

    Records of another format stay: their clusters may run.

    Returns the processes found alive; their record stays while one survives.
    """
    if not directory.is_dir():
        return []
    check_private(directory)
    found: list[ProcessId] = []
    for path in directory.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            found += _end_run(path)
    for path in directory.glob("*.token"):
        with contextlib.suppress(OSError):
            _remove_if_stale(path)
    return found


def find_runs(directory: Path) -> list[Run]:
    """Returns this host's named clusters, sorted by name, without other containers' clusters.

    Raises:
        PermissionError: other users can write to the directory.
    """
    if not directory.is_dir():
        return []
    check_private(directory)
    found = []
    for path in directory.glob("*.json"):
        # The run may end meanwhile.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, _OtherFormat):
            record = _read_record(path)
            owner = RunOwner(_from_json(record["guard"]), _from_json(record["launcher"]))
            if record["machine"] == _machine() and record["about"] and owner.launcher.is_alive():
                found.append(Run(owner, RunAbout(**record["about"]), control_path(directory, owner)))
    return sorted(found, key=lambda run: run.about.name)


def control_path(directory: Path, owner: RunOwner) -> Path:
    """Removed with the run's record."""
    return _record_path(directory, owner).with_suffix(".sock")


def ray_token_path(directory: Path, launcher: ProcessId) -> Path:
    """Removed with the run's record."""
    return _path_stem(directory, launcher).with_suffix(".token")


def region_path(directory: Path, launcher: ProcessId) -> Path:
    """Path of the socket of a page store's region. Removed with the run's record."""
    return _path_stem(directory, launcher).with_suffix(".region")


def remove_stale_regions(directory: Path) -> None:
    """Removes sockets of regions whose holder was killed. Args: directory: private to the user."""
    for path in directory.glob("*.region"):
        pid, _, start_time = path.stem.partition("-")
        if not (pid.isdigit() and start_time.isdigit()) or ProcessId(int(pid), int(start_time)).is_alive():
            continue
        # Pids of another container mean other processes, but sockets answer across containers.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller, contextlib.suppress(OSError):
            caller.setblocking(False)
            if caller.connect_ex(str(path)) == errno.ECONNREFUSED and not path.with_suffix(".json").exists():
                path.unlink()


def _end_run(path: Path) -> list[ProcessId]:
    try:
        record = _read_record(path)
        boot, namespace = record["machine"]
        owners = [_from_json(record["guard"]), _from_json(record["launcher"])]
        processes = [_from_json(item) for item in record["processes"]]
    except _OtherFormat:
        return []
    except (ValueError, KeyError, TypeError):
        _remove(path)
        return []
    this_boot, this_namespace = _machine()
    if boot != this_boot:
        _remove(path)
        return []
    # Pids of another container mean other processes. A start there ends them.
    if namespace != this_namespace or any(owner.is_alive() for owner in owners):
        return []
    left = {process for process in processes if process.is_alive()}
    left |= {below for process in left for below in descendants(process.pid)}
    if not end_processes(left, _END_GRACE_S):
        _remove(path)
    return sorted(left)


def _read_record(path: Path) -> Any:
    """Raises _OtherFormat behind a warning, ValueError."""
    record = json.loads(path.read_text())
    # Version 0.1.0 wrote none.
    if isinstance(record, dict) and (found := record.get("format", FORMAT)) != FORMAT:
        logger.warning(
            "%s is of another version of tandem: its format is %r, not %d; use the commands of that version for its "
            "cluster, or delete the file if the cluster has ended",
            path,
            found,
            FORMAT,
        )
        raise _OtherFormat
    return record


def _remove_if_stale(token: Path) -> None:
    """Removes a token without a record whose process is dead: a test or another unguarded program left it."""
    pid, _, start_time = token.stem.partition("-")
    if not (pid.isdigit() and start_time.isdigit()) or token.with_suffix(".json").exists():
        return
    if ProcessId(int(pid), int(start_time)).is_alive():
        return
    with token.open() as file:
        # Pids of another container mean other processes, but locks are visible across containers.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # An empty file was just made and is not locked yet.
        if os.fstat(file.fileno()).st_size:
            token.unlink()


def _record_path(directory: Path, owner: RunOwner) -> Path:
    return _path_stem(directory, owner.launcher).with_suffix(".json")


def _path_stem(directory: Path, launcher: ProcessId) -> Path:
    return directory / f"{launcher.pid}-{launcher.start_time}"


def _remove(path: Path) -> None:
    for suffix in (".draft", ".token", ".sock", ".region"):
        path.with_suffix(suffix).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _machine() -> list[str]:
    """Returns the boot id and pid namespace: pids are valid within these."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, str(Path("/proc/self/ns/pid").readlink())]


def _to_json(process: ProcessId) -> list[int]:
    return [process.pid, process.start_time]


def _from_json(item: Any) -> ProcessId:
    pid, start_time = item
    if not (isinstance(pid, int) and isinstance(start_time, int) and pid > 1):
        raise ValueError(f"not a process: {item!r}")
    return ProcessId(pid, start_time)

"""Regular samples of all processes of a cluster, and of the files that they write."""

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak.cluster import SoakedCluster, is_whole
from benchmarks.soak.slopes import Series
from tandem.deploy.config.bounds import Bounds
from tandem.deploy.host.run_record import default_directory
from tandem.processes import ProcessId
from tandem.v1 import inference_pb2 as pb

INTERVAL_S = 10.0
# Field of /proc/PID/status or smaps_rollup, by the name of the value.
_STATUS_FIELDS = {"RssAnon": "anon MiB", "RssShmem": "shmem MiB", "Threads": "threads"}
_KIB_PER_MIB = 1024
# What a process measures.
VALUES = ("anon MiB", "shmem MiB", "PSS MiB", "descriptors", "threads", "mappings")
_SESSION = re.compile(r"/[^ =]*/session_2[\d_-]+")
# Parts of command lines, for processes that no router names.
_KINDS_BY_COMMAND = (
    ("gcs_server", "Ray's GCS"),
    ("raylet/raylet", "Ray's raylet"),
    ("dashboard/agent", "Ray's agents"),
    ("runtime_env/agent", "Ray's agents"),
)


@dataclass
class Life:
    """One process.

    Attributes:
        kind: "" until known.
        values: by name, one per time.
        are_usual: per time: whether the cluster had its usual processes, all of them connected.
    """

    process: ProcessId
    kind: str = ""
    times_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    are_usual: list[bool] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        return self.times_s[-1] - self.times_s[0] if self.times_s else 0.0

    def series(self, name: str, *, from_age_s: float = 0.0) -> Series:
        """Return a value over time, without samples of an unusual cluster, which has more or fewer links."""
        chosen = [
            (time_s, value)
            for time_s, value, is_usual in zip(self.times_s, self.values[name], self.are_usual, strict=True)
            if is_usual and time_s >= self.times_s[0] + from_age_s
        ]
        return Series([time_s for time_s, _ in chosen], [value for _, value in chosen])


class Sampler:
    """Samples from a thread of its own until `close`.

    Attributes:
        lives: processes by identity.
        host: values of the host: files and bytes that the cluster leaves.
        num_missed: samples without an answer of a router, so that new processes may have no name.
    """

    def __init__(self, cluster: SoakedCluster, usual: Mapping[str, Bounds], interval_s: float = INTERVAL_S) -> None:
        """Args: usual: workers by role."""
        self._cluster = cluster
        self._usual = usual
        self._interval_s = interval_s
        self._began = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._session: Path | None = None
        self.lives: dict[ProcessId, Life] = {}
        self.host = Life(cluster.guard, "host")
        self.num_missed = 0
        self.error: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Raises what the thread raised."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(self._interval_s + 10.0)
        if self.error is not None:
            raise self.error

    def sample(self) -> None:
        now = time.monotonic() - self._began
        info = self._cluster.info()
        self.num_missed += info is None
        names = self._cluster.names(info) if info is not None else {}
        is_usual = info is not None and is_whole(info, self._usual)
        processes = self._cluster.processes()
        launcher = processes[1:2]
        for process in processes:
            life = self.lives.setdefault(process, Life(process))
            if process.pid in names:
                life.kind = names[process.pid].rpartition("-")[0]
            elif not life.kind:
                life.kind = _kind(process, self._cluster.guard, launcher)
            values = measure(process.pid)
            if values and process.is_alive():
                life.times_s.append(now)
                life.are_usual.append(is_usual)
                for name, value in values.items():
                    life.values[name].append(value)
        self.host.times_s.append(now)
        for name, value in (_pages(info) | self._host_values(len(processes))).items():
            self.host.values[name].append(value)

    def _host_values(self, num_processes: int) -> dict[str, float]:
        logs = list(files_below(self._cluster.log_dir))
        session = self.session_directory()
        of_ray = list(files_below(session / "logs")) if session else []
        launcher = f"{self.launcher_pid()}-"
        return {
            "processes": num_processes,
            "files of the run in /tmp": sum(path.name.startswith(launcher) for path in default_directory().iterdir()),
            "folders of Ray's sessions": sum(1 for _ in (default_directory() / "ray").glob("session_2*")),
            "files in /dev/shm, of all programs": sum(1 for _ in Path("/dev/shm").iterdir()),
            "log files of tandem": len(logs),
            "MiB of the largest log": max((size_mib([file]) for file in (*logs, *of_ray)), default=0.0),
            "MiB of tandem's logs": size_mib(logs),
            "log files of Ray": len(of_ray),
            "MiB of Ray's logs": size_mib(of_ray),
        }

    def launcher_pid(self) -> int:
        return next((life.process.pid for life in self.lives.values() if life.kind == "launcher"), 0)

    def session_directory(self) -> Path | None:
        """Return the folder of this cluster's Ray session, as its processes name it; None before Ray runs."""
        if self._session is None:
            found = (_SESSION.search(command_line(process.pid)) for process in self.lives)
            self._session = next((Path(match[0]) for match in found if match), None)
        return self._session

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._closing.wait(max(0.0, due - time.monotonic())):
                due = max(due + self._interval_s, time.monotonic())
                self.sample()
        except Exception as error:
            self.error = error


def _pages(info: pb.ServerInfo | None) -> dict[str, float]:
    """Return the pages of all workers by state."""
    stats = [worker.stats for worker in info.workers] if info is not None else []
    return {
        "pages free": sum(s.num_free_pages for s in stats),
        "pages cached": sum(s.num_cached_pages for s in stats),
        "pages locked": sum(s.num_locked_pages for s in stats),
        "pages leased": sum(s.num_leased_pages for s in stats),
    }


def measure(pid: int) -> dict[str, float]:
    """Return a process's values by name; {} if it has ended."""
    values: dict[str, float] = {}
    folder = Path(f"/proc/{pid}")
    try:
        for line in (folder / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in _STATUS_FIELDS:
                number, _, unit = value.strip().partition(" ")
                values[_STATUS_FIELDS[name]] = float(number) / (_KIB_PER_MIB if unit else 1)
        for line in (folder / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                values["PSS MiB"] = float(line.split()[1]) / _KIB_PER_MIB
        values["descriptors"] = sum(1 for _ in (folder / "fd").iterdir())
        with (folder / "maps").open() as maps:
            values["mappings"] = sum(1 for _ in maps)
    except (OSError, IndexError):
        return {}
    # A process amid its end has a status without memory.
    return values if values.keys() == set(VALUES) else {}


def command_line(pid: int) -> str:
    """Return "" for a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def files_below(directory: Path) -> Iterable[os.stat_result]:
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(Path(folder) / name)


def size_mib(files: Iterable[os.stat_result]) -> float:
    return sum(file.st_blocks * 512 for file in files) / 2**20


def _kind(process: ProcessId, guard: ProcessId, launcher: list[ProcessId]) -> str:
    if process == guard:
        return "guard"
    if process in launcher:
        return "launcher"
    command = command_line(process.pid)
    # A starting worker or router gets its name with a later sample.
    return next((kind for part, kind in _KINDS_BY_COMMAND if part in command), "")

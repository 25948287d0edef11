"""The soaked cluster, as an operator sees and handles it."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.served import ROOT, Served
from tandem.client import TandemClient, TandemError
from tandem.deploy.config.bounds import Bounds
from tandem.deploy.host.process_tree import descendants
from tandem.processes import ProcessId
from tandem.v1 import inference_pb2 as pb

COMMAND_TIMEOUT_S = 180.0
_POLL_S = 0.25
_HTTP = re.compile(r"over HTTP at http://(\S+)")


class SoakError(Exception):
    """The cluster did not do in time what it must."""


class SoakedCluster:
    """`tandem serve` in a process of its own. Use as a context manager; its end ends the cluster.

    Attributes:
        tree: all processes that the cluster has had.
    """

    def __init__(self, flags: Sequence[str], log_dir: Path, start_timeout_s: float) -> None:
        self._served = Served(flags, log_dir, start_timeout_s)
        self.guard = ProcessId.of(self._served.process.pid)
        self.grpc_address = self._served.address
        found = _HTTP.search("\n".join(self._served.lines))
        assert found is not None
        self.http_address = found[1]
        self.name = self._served.name
        self.log_dir = log_dir
        self.tree: set[ProcessId] = {self.guard}
        self._client = TandemClient(self.grpc_address)

    def __enter__(self) -> "SoakedCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.processes()
        self._client.close()
        self._served.close()

    @property
    def output(self) -> list[str]:
        """Lines that the launcher printed."""
        return self._served.lines

    def info(self) -> pb.ServerInfo | None:
        """Return None while no router answers."""
        try:
            return self._client.server_info()
        except TandemError:
            return None

    def processes(self) -> list[ProcessId]:
        """Return the living processes, the guard first."""
        found = [self.guard, *descendants(self.guard.pid)]
        self.tree.update(found)
        return found

    @staticmethod
    def names(info: pb.ServerInfo) -> dict[int, str]:
        """Return names of routers and workers by pid."""
        return {r.pid: r.router_id for r in info.routers} | {w.pid: w.worker_id for w in info.workers}

    def find(self, name: str) -> ProcessId:
        """Return a router's or worker's process. Raises SoakError: it does not run."""
        info = self.info()
        pids = {known: pid for pid, known in self.names(info).items()} if info else {}
        for process in self.processes():
            if process.pid == pids.get(name):
                return process
        raise SoakError(f"{name} does not run")

    def command(self, *arguments: str) -> tuple[int, str]:
        """Run `tandem ARGUMENTS`. Returns its exit status and what it printed."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        ran = subprocess.run(
            [sys.executable, "-m", "tandem.deploy.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": path},
        )
        return ran.returncode, ran.stdout.strip()

    def wait_whole(self, sizes: Mapping[str, Bounds], timeout_s: float) -> float:
        """Wait until all routers and workers serve, and all links are up. Returns the seconds. Raises SoakError."""
        began = time.monotonic()
        while not is_whole(info := self.info(), sizes):
            if time.monotonic() - began > timeout_s:
                workers = [f"{w.worker_id} (linked to {len(w.linked_to)})" for w in info.workers] if info else []
                raise SoakError(f"not whole within {timeout_s:.0f} s: {workers or 'no router answers'}")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def wait_idle(self, timeout_s: float) -> str:
        """Wait until no request and no page is held. Returns "" or what is still held."""
        deadline = time.monotonic() + timeout_s
        while held := _held(self.info()):
            if time.monotonic() > deadline:
                return held
            time.sleep(_POLL_S)
        return ""


def is_whole(info: pb.ServerInfo | None, sizes: Mapping[str, Bounds]) -> bool:
    """Return whether all routers, and so many workers with all links, serve.

    Args:
        sizes: workers by role; those of other roles do not count.
    """
    if info is None or not info.ready or not all(router.alive for router in info.routers):
        return False
    alive = [worker for worker in info.workers if worker.alive]
    counts = {role: sum(worker.role == role for worker in alive) for role in sizes}
    num_links = sum(len(worker.linked_to) for worker in alive if worker.role == "prefill")
    are_enough = all(counts[role] == bounds.clamp(counts[role]) for role, bounds in sizes.items())
    return are_enough and num_links == counts["prefill"] * counts["decode"]


def _held(info: pb.ServerInfo | None) -> str:
    if info is None:
        return "no router answers"
    held = [f"{info.num_requests} requests"] if info.num_requests else []
    for worker in info.workers:
        stats = worker.stats
        counts = {
            "queued": stats.num_queued,
            "running": stats.num_running,
            "locked pages": stats.num_locked_pages,
            "leased pages": stats.num_leased_pages,
            "pages lost": stats.num_total_pages
            - stats.num_free_pages
            - stats.num_cached_pages
            - stats.num_locked_pages
            - stats.num_leased_pages,
        }
        held += [f"{worker.worker_id}: {count} {what}" for what, count in counts.items() if count]
    return ", ".join(held)

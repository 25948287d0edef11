"""Logs of a cluster's current and past processes, on all nodes of its Ray."""

import codecs
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tandem.deploy.on_ray.hosted_ray import namespace_of
from tandem.deploy.on_ray.ray_module import (
    ActorTableData,
    NodeAffinitySchedulingStrategy,
    RayError,
    ray,
    ray_worker,
    state,
)
from tandem.logs import log_file

MAX_BYTES = 1 << 20
# A node's first process takes seconds to start.
_ANSWER_TIMEOUT_S = 30.0
_RAYS_OWN = (":job_id:", ":actor_name:", ":task_name:")


class ProcessLog(NamedTuple):
    """
    Attributes:
        path: the file; "": Ray's file of the process's standard error.
        pid: process id in the name of Ray's file.
    """

    node_id: str
    address: str
    path: str
    pid: int


class LogError(Exception):
    """A log cannot be read; the message is for users."""


def find_logs(cluster: str, process: str, log_dir: str) -> list[ProcessLog]:
    """Returns the logs of all lives of a process, the latest last, also of earlier clusters of that name.

    Args:
        log_dir: the nodes' log directory; "": Ray's own.
    """
    lives = sorted(_lives(cluster).get(process, []))
    path = str(log_file(log_dir, process)) if log_dir else ""
    logs = [ProcessLog(node_id, address, path, 0 if path else pid) for _, node_id, address, pid in lives]
    # Lives on one node write to one file.
    return list(dict.fromkeys(reversed(logs)))[::-1]


def process_names(cluster: str) -> list[str]:
    return sorted(_lives(cluster))


class LogReader:
    """Reads logs on their nodes. One per command: Ray keeps the sent code of each reader until the command ends."""

    def __init__(self) -> None:
        self._remote = ray.remote(_read)

    def read(self, log: ProcessLog, position: int | None) -> tuple[str, int]:
        """Returns text from a byte position on, and the next position.

        Args:
            position: None: the last MAX_BYTES.

        Raises:
            LogError: the node is gone, or has no such file.
        """
        if not any(node["Alive"] and node["NodeID"] == log.node_id for node in ray.nodes()):
            raise LogError(f"the node {log.address}, which has the log, is not in the Ray any more")
        here = sys.modules[__name__]
        there = NodeAffinitySchedulingStrategy(log.node_id, soft=False)
        # The node may lack our code.
        ray.cloudpickle.register_pickle_by_value(here)
        try:
            read: Callable[..., Any] = self._remote.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote
            ref = read(log.path, log.pid, -1 if position is None else position, MAX_BYTES)
        finally:
            ray.cloudpickle.unregister_pickle_by_value(here)
        try:
            found, data, position = ray.get(ref, timeout=_ANSWER_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            reason = " ".join(str(error).split()) or "it does not answer"
            raise LogError(f"the node {log.address} cannot be asked: {reason}") from error
        if not found:
            raise LogError(f"the node {log.address} has no log {log.path or f'of the process {log.pid}'}")
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        # The last character may be incomplete.
        position -= len(decoder.getstate()[0])
        if not log.path:
            text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_RAYS_OWN))
        return text, position


def _lives(cluster: str) -> dict[str, list[tuple[int, str, str, int]]]:
    """Returns start time, node, address and pid of each life, by process. Life numbers repeat in later clusters."""
    found: dict[str, list[tuple[int, str, str, int]]] = {}
    for table in state.state._connect_and_get_accessor().get_actor_table(None, None):
        actor = ActorTableData.FromString(table)
        name, _, life = actor.name.rpartition(".")
        if actor.ray_namespace == namespace_of(cluster) and life.isdigit() and actor.pid:
            place = (actor.start_time, actor.address.node_id.hex(), actor.address.ip_address, actor.pid)
            found.setdefault(name, []).append(place)
    return found


def _read(path: str, pid: int, position: int, num_bytes: int) -> tuple[str, bytes, int]:
    """Runs on the node; returns the file's path or "", bytes, and the next position."""
    if not path:
        assert ray_worker._global_node is not None
        of_pid = Path(ray_worker._global_node.get_logs_dir_path()).glob(f"worker-*-{pid}.err")
        path = max(map(str, of_pid), key=os.path.getmtime, default="")
    if not Path(path).is_file():
        return "", b"", 0
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(position if 0 <= position <= size else max(0, size - num_bytes))
        data = file.read(num_bytes)
        return path, data, file.tell()

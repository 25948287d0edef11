"""A separately started Ray, for clusters to join."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.deploy.on_ray.ray_probe import call_ray
from tandem.processes import ProcessId
from tests.cluster.command import START_S
from tests.cluster.conftest import wait_until

TOKEN = "ab" * 32
_FAKE_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
_HEAD_TYPE = "ray.head.default"


def fake_node(number: int) -> str:
    """Returns the id of a node that the autoscaler starts; 0: the head."""
    return f"{'f' * 51}{number:05}"


@dataclass(frozen=True)
class Autoscaling:
    """Ray's autoscaler with its fake nodes, which are processes of this host.

    Attributes:
        is_v2: the second of Ray's autoscalers.
        idle_s: time after which an idle node goes.
    """

    is_v2: bool
    num_cpus: int = 1
    max_nodes: int = 2
    idle_s: float = 15.0

    def flags(self, directory: Path, address: str, num_head_cpus: int) -> list[str]:
        provider: dict[str, Any] = {"type": "external", "module": _FAKE_PROVIDER, "gcs_address": address}
        provider |= dict.fromkeys(("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check"), True)
        provider |= {"launch_multiple": True, "head_node_id": fake_node(0)} if self.is_v2 else {}
        resources = {"CPU": self.num_cpus, "object_store_memory": 80_000_000}
        types = {
            _HEAD_TYPE: {"resources": {"CPU": num_head_cpus}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": self.max_nodes},
        }
        # Required, though fake nodes have no use for them.
        commands = ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray", "initialization")
        file = directory / "autoscaling.json"
        file.write_text(
            json.dumps(
                {
                    "cluster_name": "fake",
                    "max_workers": self.max_nodes,
                    "provider": provider,
                    "head_node_type": _HEAD_TYPE,
                    "idle_timeout_minutes": self.idle_s / 60.0,
                    "available_node_types": types,
                    "auth": {"ssh_user": "nobody"},
                    **{f"{name}_commands": [] for name in commands},
                    "file_mounts": {},
                    "cluster_synced_files": [],
                    "rsync_exclude": [],
                    "rsync_filter": [],
                }
            )
        )
        return [f"--autoscaling-config={file}"]

    @property
    def variables(self) -> dict[str, str]:
        found = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        if self.is_v2:
            found |= {
                "RAY_enable_autoscaler_v2": "1",
                "RAY_CLOUD_INSTANCE_ID": fake_node(0),
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": fake_node(0),
                "RAY_NODE_TYPE_NAME": _HEAD_TYPE,
            }
        return found


@dataclass
class JoinableRay:
    address: str
    process: subprocess.Popen[bytes]

    def answers(self) -> bool:
        try:
            call_ray(self.address, TOKEN)
        except grpc.RpcError:
            return False
        return True

    def has_node(self) -> bool:
        return any("RuntimeEnvAgent" in title for title in self._titles().values())

    def has_fake_node(self, node_id: str) -> bool:
        return any("/raylet" in title.split(" ")[0] and node_id in title for title in self._titles().values())

    def actors(self) -> list[ProcessId]:
        return self.processes("ray::WorkerActor", "ray::RouterActor")

    def processes(self, *names: str) -> list[ProcessId]:
        return [process for process, title in self._titles().items() if title.startswith(names)]

    def _titles(self) -> dict[ProcessId, str]:
        found = {}
        for process in descendants(self.process.pid):
            # It may have ended meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                found[process] = " ".join(psutil.Process(process.pid).cmdline())
        return found


@contextlib.contextmanager
def joinable_ray(num_cpus: int, autoscaling: Autoscaling | None = None) -> Iterator[JoinableRay]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Ray's socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        more = autoscaling.flags(Path(directory), f"127.0.0.1:{port}", num_cpus) if autoscaling is not None else []
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                *("start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"),
                *("--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={num_cpus}"),
                *("--object-store-memory=80000000", f"--temp-dir={directory}"),
                *more,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Actors must import everything as the launcher does, without our environment.
            env={
                "PATH": os.environ["PATH"],
                "HOME": os.environ.get("HOME", "/"),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": TOKEN,
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                # Ray's default niceness delays the actors' start on a busy host.
                "RAY_worker_niceness": "0",
                # Another checkout than the installed one.
                **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
                **(autoscaling.variables if autoscaling is not None else {}),
            },
        )
        started = JoinableRay(f"127.0.0.1:{port}", process)
        try:
            wait_until(started.answers, START_S, "Ray is up")
            # Ray answers shortly before its node is registered.
            wait_until(started.has_node, START_S, "its node is up")
            yield started
        finally:
            end_processes([*descendants(process.pid), ProcessId.of(process.pid)], 5.0)
            process.wait()

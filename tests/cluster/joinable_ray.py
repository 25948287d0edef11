"""A separately started Ray, for clusters to join."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from tandem.deploy.host.process_tree import descendants, end_processes
from tandem.deploy.on_ray.ray_probe import call_ray
from tandem.processes import ProcessId
from tests.cluster.command import START_S
from tests.cluster.conftest import wait_until

TOKEN = "ab" * 32


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

    def actors(self) -> list[ProcessId]:
        return self.processes("ray::WorkerActor", "ray::RouterActor")

    def processes(self, *names: str) -> list[ProcessId]:
        found = []
        for process in descendants(self.process.pid):
            try:
                title = " ".join(psutil.Process(process.pid).cmdline())
            except psutil.NoSuchProcess:
                continue
            if title.startswith(names):
                found.append(process)
        return found


@contextlib.contextmanager
def joinable_ray(num_cpus: int) -> Iterator[JoinableRay]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Ray's socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                *("start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"),
                *("--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={num_cpus}"),
                *("--object-store-memory=80000000", f"--temp-dir={directory}"),
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
            },
        )
        started = JoinableRay(f"127.0.0.1:{port}", process)
        try:
            wait_until(started.answers, START_S, "Ray is up")
            # Ray answers shortly before its node is registered.
            wait_until(
                lambda: any(
                    "RuntimeEnvAgent" in " ".join(p.cmdline()) for p in psutil.Process(process.pid).children(True)
                ),
                START_S,
                "its node is up",
            )
            yield started
        finally:
            end_processes([*descendants(process.pid), ProcessId.of(process.pid)], 5.0)
            process.wait()

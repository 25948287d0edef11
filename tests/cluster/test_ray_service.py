"""The cluster as a Ray Serve application, as under KubeRay."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.command import GONE_S, START_S, own_name, tandem
from tests.cluster.conftest import wait_until
from tests.cluster.joinable_ray import TOKEN, JoinableRay, joinable_ray

SERVE_S = 120.0
with socket.socket() as _probe:
    _probe.bind(("127.0.0.1", 0))
    # Ray Serve's HTTP port.
    SERVE_PORT = _probe.getsockname()[1]


@pytest.fixture(scope="module")
def joinable() -> Iterator[JoinableRay]:
    with joinable_ray(num_cpus=4) as started:
        yield started


def operator(ray: JoinableRay, what: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster.on_ray_serve", what, ray.address, str(SERVE_PORT), *arguments],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=SERVE_S,
    )


def is_running(ray: JoinableRay) -> bool:
    return operator(ray, "look").stdout.startswith("RUNNING")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ray_serve_starts_replaces_and_stops_the_cluster(
    joinable: JoinableRay, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    _, name = own_name()
    on = ("--ray-address", joinable.address)
    config = tmp_path / "serve.yaml"
    options = {"model": str(tiny_model_dir), "both": 1, "threads": 1, "num-pages": 64, "grpc-port": 0, "http-port": 0}

    # Serve repeats the error of `tandem serve`.
    config.write_text(yaml.safe_dump({**options, "model": str(tmp_path)}))
    refused = operator(joinable, "deploy", str(config), name)
    assert refused.returncode != 0
    assert "config.json" in operator(joinable, "look").stdout
    assert joinable.actors() == []
    operator(joinable, "delete")

    config.write_text(yaml.safe_dump(options))
    deployed = operator(joinable, "deploy", str(config), name)
    assert deployed.returncode == 0, deployed.stderr
    # A running application serves.
    address = tandem("status", name, *on)
    assert address.returncode == 0 and "both-0" in address.stdout
    assert is_running(joinable)
    # KubeRay's check of the head's Pod.
    with urllib.request.urlopen(f"http://127.0.0.1:{SERVE_PORT}/-/healthz", timeout=10.0) as answer:
        assert answer.read() == b"success"

    # The replica dies: its successor takes the cluster over.
    actors = joinable.actors()
    for process in joinable.processes("ray::ServeReplica"):
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: is_running(joinable), SERVE_S, "a replica is there again")
    assert joinable.actors() == actors

    # The cluster ends: Serve's new replica restarts it.
    assert tandem("stop", name, *on).returncode == 0
    wait_until(lambda: tandem("status", name, *on).returncode == 0, SERVE_S, "the cluster is there again")
    assert not set(joinable.actors()) & set(actors)

    assert operator(joinable, "delete").returncode == 0
    wait_until(lambda: joinable.actors() == [], GONE_S + START_S, "the cluster has ended")
    assert "no cluster is on the Ray" in tandem("list", *on).stdout

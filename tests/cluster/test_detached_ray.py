"""Clusters on an existing Ray that outlive their command."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.processes import ProcessId
from tests.cluster.command import GONE_S, START_S, own_name, start, tandem
from tests.cluster.conftest import Oracle, wait_until
from tests.cluster.joinable_ray import TOKEN, JoinableRay, joinable_ray
from tests.cluster.request_stream import RequestStream

PORTS = ("--grpc-port", "0", "--http-port", "0")
POOL = ("--threads", "1", "--num-pages", "128", "--chunk-size", "48")
# Includes Ray's restart of the supervisor actor.
BACK_S = 60.0


@pytest.fixture(scope="module")
def joinable() -> Iterator[JoinableRay]:
    with joinable_ray(num_cpus=8) as started:
        yield started


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)


class NamedCluster:
    """Attributes: on: command-line arguments that name the Ray; address: gRPC address."""

    def __init__(self, ray: JoinableRay, model_dir: Path, *more: str) -> None:
        _, self.name = own_name()
        self.on = ("--ray-address", ray.address)
        model = ("--model", str(model_dir))
        done = tandem("serve", "--name", self.name, "--detach", *model, *self.on, *PORTS, *POOL, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"over gRPC at (\S+)", done.stdout)
        assert found is not None, done.stdout
        self.address = found[1]

    def call(self, command: str, *more: str) -> subprocess.CompletedProcess[str]:
        return tandem(command, self.name, *self.on, *more)


def supervisors(ray: JoinableRay) -> list[ProcessId]:
    return ray.processes("ray::SupervisorActor")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_clusters_on_one_ray_are_independent_and_survive_their_supervisors(
    joinable: JoinableRay, tiny_model_dir: Path, tiny_oracle: Oracle
) -> None:
    first = NamedCluster(joinable, tiny_model_dir)
    second = NamedCluster(joinable, tiny_model_dir, "--both", "1")
    assert len(joinable.actors()) == 5
    listed = tandem("list", *first.on).stdout
    assert first.name in listed and second.name in listed
    again = tandem("serve", "--name", first.name, "--detach", "--model", str(tiny_model_dir), *first.on, *PORTS)
    assert again.returncode == 2 and f"a cluster named {first.name} is on the Ray at" in again.stderr
    assert "decode-0" in first.call("status").stdout and "both-0" in second.call("status").stdout

    with RequestStream(first.address, tiny_oracle) as stream, RequestStream(second.address, tiny_oracle) as others:
        up = first.call("scale", "--decode", "2")
        assert up.returncode == 0, up.stdout + up.stderr
        full = second.call("scale", "--both", "9")
        assert full.returncode == 2 and "no room for 8 more workers" in full.stderr

        # Clients must not notice.
        actors = set(joinable.actors())
        killed = supervisors(joinable)
        assert len(killed) == 2
        for process in killed:
            os.kill(process.pid, signal.SIGKILL)
        stream.wait_more(5)
        wait_until(lambda: len(set(supervisors(joinable)) - set(killed)) == 2, BACK_S, "the supervisors are back")
        wait_until(lambda: "takes over" in first.call("logs").stdout, BACK_S, "the first has taken over")
        assert set(joinable.actors()) == actors, "what runs goes on, and nothing was started twice"
        worker = joinable.processes("ray::WorkerActor")[0]
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: len(joinable.actors()) == 6 and not worker.is_alive(), BACK_S, "the worker is back")
        down = wait_until(lambda: (d := first.call("scale", "--decode", "1")).returncode == 0 and d, BACK_S, "scaled")
        assert "decode-1: has left" in down.stdout
        stream.wait_more(5)
        others.wait_more(5)

    stopped = first.call("stop")
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: len(joinable.actors()) == 2, GONE_S, "the first has gone, and the second not")
    wait_until(lambda: len(supervisors(joinable)) == 1, GONE_S, "nor has its supervisor")
    assert first.name not in tandem("list", *first.on).stdout
    with RequestStream(second.address, tiny_oracle) as others:
        others.wait_more(3)
    assert second.call("stop").returncode == 0
    wait_until(lambda: joinable.actors() == supervisors(joinable) == [], GONE_S, "all is gone")
    assert joinable.answers() and joinable.process.poll() is None
    assert second.call("stop").returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_killed_command_leaves_the_cluster_and_interrupt_stops_it(
    joinable: JoinableRay, tiny_model_dir: Path, tiny_oracle: Oracle, tmp_path: Path
) -> None:
    on = ("--ray-address", joinable.address)
    flags = ("--model", str(tiny_model_dir), *on, "--both", "1", *POOL)
    server = start(*flags, runtime_dir=tmp_path)
    os.killpg(server.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(p.is_alive() for p in server.tree), GONE_S, "the command is gone")
    with RequestStream(server.address, tiny_oracle) as stream:
        stream.wait_more(5)
    assert tandem("stop", server.name, *on).returncode == 0
    wait_until(lambda: joinable.actors() == supervisors(joinable) == [], GONE_S, "all is gone")

    server = start(*flags, runtime_dir=tmp_path)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(START_S) == 0
    wait_until(lambda: joinable.actors() == supervisors(joinable) == [], GONE_S, "all is gone")

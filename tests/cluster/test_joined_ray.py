"""Clusters on a Ray that was there before: they do not meet, leave nothing of theirs behind, and leave it running."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from deploy.process_tree import descendants, end_processes
from deploy.ray_probe import call_ray
from tandem import exit_codes
from tandem.processes import ProcessId
from tests.cluster.command import GONE_S, START_S, Server, start, tandem
from tests.cluster.conftest import wait_until

TOKEN = "ab" * 32
NUM_CPUS = 4
# Ray notices only by silence that a node was killed.
NODE_GONE_S = 45.0
# A prefill and a decode worker would need three processes, and two of these clusters need four.
ONE_WORKER = ("--both", "1", "--threads", "1", "--num-pages", "64")


@dataclass
class JoinableRay:
    """A Ray on loopback that `ray start` has started."""

    address: str
    process: subprocess.Popen[bytes]

    def answers(self) -> bool:
        try:
            call_ray(self.address, TOKEN)
        except grpc.RpcError:
            return False
        return True

    def actors(self) -> list[ProcessId]:
        """Those of clusters."""
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


@pytest.fixture(scope="module")
def joinable() -> Iterator[JoinableRay]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The names of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                *("start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}"),
                *("--include-dashboard=false", "--disable-usage-stats", f"--num-cpus={NUM_CPUS}"),
                *("--object-store-memory=80000000", f"--temp-dir={directory}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Nothing of ours is in its environment: what the actors import they find where the launcher does.
            env={
                "PATH": os.environ["PATH"],
                "HOME": os.environ.get("HOME", "/"),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": TOKEN,
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                # Whatever else runs on the host would keep the actors from starting in time, as the documents say.
                "RAY_worker_niceness": "0",
            },
        )
        started = JoinableRay(f"127.0.0.1:{port}", process)
        try:
            wait_until(started.answers, START_S, "Ray is up")
            # It answers a moment before its node is there, without which nobody can join.
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


def finish(server: Server) -> None:
    if server.process.poll() is None:
        server.process.terminate()
    end_processes(server.tree, GONE_S)


@pytest.mark.slow
def test_two_clusters_are_on_one_ray_that_outlives_both(
    joinable: JoinableRay, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    flags = ("--model", str(tiny_model_dir), "--ray-address", joinable.address, *ONE_WORKER)
    first = start(*flags, runtime_dir=tmp_path)
    try:
        second = start(*flags, runtime_dir=tmp_path)
        try:
            actors = joinable.actors()
            assert len(actors) == 4
            generate = ("generate", "--max-tokens", "4", "--address")
            assert [tandem(*generate, s.address, "hello").returncode for s in (first, second)] == [0, 0]
            # No place is left for a third.
            third = tandem("serve", *flags, "--grpc-port", "0", "--http-port", "0")
            assert third.returncode == exit_codes.USAGE
            assert "has 0 CPUs left on this host" in third.stderr and "--num-cpus" in third.stderr

            # One that stops takes its actors with it, and nobody else's.
            first.process.terminate()
            assert first.finish() == 0
            wait_until(lambda: len(joinable.actors()) == 2, GONE_S, "the actors of the first have ended")
            assert tandem(*generate, second.address, "hello").returncode == 0 and joinable.answers()

            # So does one that can say nothing any more.
            for process in descendants(second.process.pid):
                os.kill(process.pid, signal.SIGKILL)
            second.process.kill()
            wait_until(lambda: joinable.actors() == [], 2 * GONE_S, "the actors of the second have ended")
            assert joinable.answers() and joinable.process.poll() is None
        finally:
            finish(second)
    finally:
        finish(first)
    # It is as free as before.
    again = start(*flags, runtime_dir=tmp_path)
    again.process.terminate()
    assert again.finish() == 0 and joinable.answers()


@pytest.mark.slow
def test_what_is_wrong_is_said(
    joinable: JoinableRay, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refusal(address: str, *more: str) -> str:
        flags = ("--model", str(tiny_model_dir), "--grpc-port", "0", "--http-port", "0", *ONE_WORKER)
        done = tandem("serve", *flags, "--ray-address", address, *more)
        assert done.returncode == exit_codes.USAGE, done.stderr
        return done.stderr

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    # A cluster that this process has started keeps its own Ray's there.
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    assert "asks for a token: set RAY_AUTH_TOKEN" in refusal(joinable.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "cd" * 32)
    assert "does not take this token" in refusal(joinable.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert "no Ray answers at 127.0.0.1:1 (UNAVAILABLE)" in refusal("127.0.0.1:1")
    assert "0 GPUs" in refusal(joinable.address, "--device", "cuda")
    assert joinable.answers() and joinable.actors() == []


# It comes last: the Ray of all tests is gone afterwards.
@pytest.mark.slow
def test_a_cluster_ends_with_the_ray_that_it_is_on(
    joinable: JoinableRay, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    server = start("--model", str(tiny_model_dir), "--ray-address", joinable.address, *ONE_WORKER, runtime_dir=tmp_path)
    try:
        (raylet,) = [p for p in descendants(joinable.process.pid) if psutil.Process(p.pid).name() == "raylet"]
        os.kill(raylet.pid, signal.SIGKILL)
        assert server.process.wait(NODE_GONE_S) == exit_codes.FAILED
        assert [p for p in server.tree if p.is_alive()] == []
        wait_until(lambda: joinable.actors() == [], GONE_S, "its processes have ended")
    finally:
        finish(server)

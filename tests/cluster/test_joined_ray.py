"""Clusters on an existing Ray are independent, and leave only Ray behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem import exit_codes
from tandem.deploy.host.process_tree import descendants, end_processes
from tests.cluster.command import GONE_S, Server, start, tandem
from tests.cluster.conftest import wait_until
from tests.cluster.joinable_ray import TOKEN, JoinableRay, joinable_ray
from tests.cluster.test_page_store import regions_of

NUM_CPUS = 4
# Ray notices a killed node only by its silence.
NODE_GONE_S = 45.0
# Two 1P1D clusters would need six processes.
ONE_WORKER = ("--both", "1", "--threads", "1", "--num-pages", "64")


@pytest.fixture(scope="module")
def joinable() -> Iterator[JoinableRay]:
    with joinable_ray(NUM_CPUS) as started:
        yield started


def finish(server: Server) -> None:
    if server.process.poll() is None:
        server.process.terminate()
    end_processes(server.tree, GONE_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_clusters_on_one_ray(
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
            third = tandem("serve", *flags, "--grpc-port", "0", "--http-port", "0")
            assert third.returncode == exit_codes.USAGE
            assert "has 0 CPUs left on this host" in third.stderr and "--num-cpus" in third.stderr

            first.process.terminate()
            assert first.finish() == 0
            wait_until(lambda: len(joinable.actors()) == 2, GONE_S, "the actors of the first have ended")
            assert tandem(*generate, second.address, "hello").returncode == 0 and joinable.answers()

            # A cluster without its command runs until it is stopped.
            for process in descendants(second.process.pid):
                os.kill(process.pid, signal.SIGKILL)
            second.process.kill()
            assert tandem(*generate, second.address, "hello").returncode == 0
            assert tandem("stop", second.name, "--ray-address", joinable.address).returncode == 0
            wait_until(lambda: joinable.actors() == [], GONE_S, "the actors of the second have ended")
            assert joinable.answers() and joinable.process.poll() is None
        finally:
            finish(second)
    finally:
        finish(first)
    again = start(*flags, runtime_dir=tmp_path)
    again.process.terminate()
    assert again.finish() == 0 and joinable.answers()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_on_one_host_has_its_page_store(
    joinable: JoinableRay, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    of_store = ("ray::RegionKeeper", "ray::StoreActor")
    secrets = []
    for _ in range(2):
        stored = ("--store-memory", "16MiB", "--store-disk", f"{tmp_path}/pages:64MiB")
        server = start(
            *("--model", str(tiny_model_dir), "--ray-address", joinable.address, *ONE_WORKER, *stored),
            runtime_dir=tmp_path,
        )
        try:
            assert len(joinable.processes(*of_store)) == 2
            (region,) = {frozenset(regions_of(p.pid)) for p in joinable.processes("ray::WorkerActor", *of_store)}
            assert len(region) == 1
            assert tandem("generate", "--max-tokens", "4", "--address", server.address, "hello").returncode == 0
            asked = ("restart", server.name, "store-0", "--ray-address", joinable.address)
            restarted = tandem(*asked)
            assert restarted.returncode == 0, restarted.stderr
            assert {frozenset(regions_of(p.pid)) for p in joinable.processes(*of_store)} == {region}
            secrets.append((tmp_path / "pages" / "secret").read_bytes())
            server.process.terminate()
            assert server.finish() == 0
        finally:
            finish(server)
        wait_until(lambda: joinable.processes(*of_store) == [], GONE_S, "nothing is left of the store")
    assert secrets[0] == secrets[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wrong_settings_are_reported(
    joinable: JoinableRay, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refusal(address: str, *more: str) -> str:
        flags = ("--model", str(tiny_model_dir), "--grpc-port", "0", "--http-port", "0", *ONE_WORKER)
        done = tandem("serve", *flags, "--ray-address", address, *more)
        assert done.returncode == exit_codes.USAGE, done.stderr
        return done.stderr

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    # Set by clusters of this process.
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    assert "asks for a token: set RAY_AUTH_TOKEN" in refusal(joinable.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "cd" * 32)
    assert "does not take this token" in refusal(joinable.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert "no Ray answers at 127.0.0.1:1 (UNAVAILABLE)" in refusal("127.0.0.1:1")
    assert "0 GPUs" in refusal(joinable.address, "--device", "cuda")
    assert joinable.answers() and joinable.actors() == []


# Last, because it ends the shared Ray.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cluster_ends_with_its_ray(
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

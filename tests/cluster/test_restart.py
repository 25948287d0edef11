"""Restarts of single processes under load: no stream loses or repeats a token, and no client sees an error."""

import os
import random
import threading
from contextlib import ExitStack

import pytest
import ray

from tandem.client import TandemClient
from tandem.deploy.supervise.change import ChangeJob
from tests.cluster.conftest import RESTART_S, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import LiveStream

# The load takes turns with starting processes on a busy host.
pytestmark = pytest.mark.timeout(400)
NUM_TOKENS = 300


@pytest.fixture
def served(tiny_routers: ServedCluster) -> ServedCluster:
    return tiny_routers


def pid_of(served: ServedCluster, name: str) -> int:
    pid: int = ray.get(served.cluster.actor(name).__ray_call__.remote(lambda actor: os.getpid()))
    return pid


def finish(job: ChangeJob) -> list[str]:
    """Return the lines of a job without errors."""
    lines = []
    while (line := job.next_line(RESTART_S)) is not None:
        assert line, "no word for a long time"
        lines.append(line)
    assert job.error == ""
    return lines


class Load:
    """Streams one after the other on several threads, until the end of the context."""

    def __init__(self, served: ServedCluster, oracle: Oracle, client: TandemClient, seed: int) -> None:
        self._served = served
        self._oracle = oracle
        self._client = client
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.streams: list[LiveStream] = []

    def __enter__(self) -> "Load":
        self._thread.start()
        wait_until(lambda: self.streams and self.streams[0].wait_tokens(1), 20.0, "the load has begun")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            stream = LiveStream(
                self._served, random_ids(self._rng, 40), client=self._client, max_tokens=NUM_TOKENS, ignore_eos=True
            )
            self.streams.append(stream)
            stream.finish()

    def check(self) -> None:
        """Every stream has exactly its tokens."""
        for stream in self.streams:
            answer = stream.finish()
            assert len(answer.token_ids) == NUM_TOKENS
            assert self._oracle.confirms(stream.prompt_ids, answer.token_ids)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("router-0",), id="router"),
        pytest.param(("router-0", "router-1"), id="routers", marks=pytest.mark.slow),
        pytest.param(("decode-0", "prefill-0"), id="workers", marks=pytest.mark.slow),
    ],
)
def test_restart_under_load_loses_no_token(served: ServedCluster, tiny_oracle: Oracle, names: tuple[str, ...]) -> None:
    with ExitStack() as open_clients:
        clients = [open_clients.enter_context(TandemClient(served.cluster.addresses.grpc)) for _ in range(3)]
        with ExitStack() as running:
            loads = [
                running.enter_context(Load(served, tiny_oracle, client, seed)) for seed, client in enumerate(clients)
            ]
            for name in names:
                pid = pid_of(served, name)
                lines = finish(served.cluster.restart(name))
                assert lines[-2:] == [f"{name}: starting again", f"{name}: ready"]
                assert pid_of(served, name) != pid
        for load in loads:
            load.check()
    assert served.client.server_info().ready


def test_unknown_process_is_refused(served: ServedCluster) -> None:
    job = served.cluster.restart("router-7")
    assert job.next_line(RESTART_S) is None and job.is_usage
    there = "router-0, router-1, prefill-0, decode-0, decode-1"
    assert job.error == f"the cluster has no process router-7; there are: {there}"


def test_other_protocol_version_is_refused_before_anything_ends(
    served: ServedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = pid_of(served, "router-0")
    monkeypatch.setattr("tandem.deploy.supervise.installed.PROTOCOL_VERSION", 0)
    job = served.cluster.restart("router-0")
    assert job.next_line(RESTART_S) is None
    assert "cannot join the running" in job.error and "protocol version" in job.error
    assert pid_of(served, "router-0") == pid

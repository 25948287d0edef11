"""A cluster on a Ray that adds nodes on demand and gives idle ones back; its fake nodes are processes of this host."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.client import TandemClient
from tandem.v1 import inference_pb2 as pb
from tests.cluster.command import START_S, Server, start, tandem
from tests.cluster.conftest import Answer, random_ids, wait_until
from tests.cluster.joinable_ray import TOKEN, Autoscaling, JoinableRay, fake_node, joinable_ray
from tests.cluster.test_joined_ray import finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

NUM_CLIENTS = 3
NUM_TOKENS = 200
# Shorter than a stream, so that some restart elsewhere.
DRAIN_S = 0.5
# Longer than a fake node and a worker take to start.
NOTICE_S = 60
# Ray looks for idle nodes after 15 s, and for room every few seconds.
NODE_GONE_S = 120.0


@pytest.fixture(params=[False, True], ids=["v1", "v2"])
def autoscaled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinableRay]:
    """A head with room for a router and a worker."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with joinable_ray(2, Autoscaling(is_v2=request.param)) as started:
        yield started


class Clients:
    """Clients that repeat seeded streams, and compare each with its first."""

    def __init__(self, server: Server) -> None:
        rng = random.Random(0)
        self._address = server.address
        self._prompts = [random_ids(rng, 40) for _ in range(NUM_CLIENTS)]
        self._stop = threading.Event()
        self.num_streams = 0
        self.wrong: list[object] = []
        with TandemClient(server.address) as client:
            self._expected = [self._stream(client, number) for number in range(NUM_CLIENTS)]
        self._threads = [threading.Thread(target=self._repeat, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.wrong == [] and self.num_streams >= NUM_CLIENTS

    def _repeat(self, number: int) -> None:
        with TandemClient(self._address) as client:
            while not self._stop.is_set():
                try:
                    token_ids = self._stream(client, number)
                except Exception as error:
                    self.wrong.append(error)
                    return
                self.num_streams += 1
                if token_ids != self._expected[number]:
                    self.wrong.append((number, token_ids))

    def _stream(self, client: TandemClient, number: int) -> list[int]:
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=number, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=self._prompts[number]), sampling=sampling)
        answer = Answer()
        for response in client.generate(request, timeout_s=NODE_GONE_S):
            answer.add(response)
        return answer.token_ids


def announce_end(ray: JoinableRay, node_id: str) -> None:
    subprocess.run(
        [
            str(Path(sys.executable).with_name("ray")),
            *("drain-node", f"--address={ray.address}", f"--node-id={node_id}"),
            *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"),
            f"--deadline-remaining-seconds={NOTICE_S}",
        ],
        env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        check=True,
        timeout=60.0,
    )


def workers(server: Server) -> list[str]:
    with TandemClient(server.address) as client:
        return sorted(worker.worker_id for worker in client.server_info().workers if worker.alive)


def test_nodes_come_for_workers_and_go(autoscaled: JoinableRay, tiny_model_dir: Path, tmp_path: Path) -> None:
    server = start(
        *("--model", str(tiny_model_dir), "--workers", "1", "--threads", "1", "--num-pages", "128"),
        *("--ray-address", autoscaled.address, "--placement-strategy", "pack", "--drain-timeout", str(DRAIN_S)),
        runtime_dir=tmp_path,
    )
    try:
        of_cluster = (server.name, "--ray-address", autoscaled.address)
        grown = tandem("scale", *of_cluster, "--workers", "2", timeout_s=START_S)
        assert grown.returncode == 0, grown.stderr
        assert "waiting for Ray to add a node: worker-1 needs {CPU: 1}" in grown.stdout
        # Ray may start more than it needs.
        wait_until(lambda: len(nodes(autoscaled)) == 1, NODE_GONE_S, "only the worker's node is left")
        (node_id,) = nodes(autoscaled)

        clients = Clients(server)
        try:
            announce_end(autoscaled, node_id)
            wait_until(lambda: workers(server) == ["worker-0", "worker-2"], NODE_GONE_S, "another worker serves")
            wait_until(lambda: node_id not in nodes(autoscaled), NODE_GONE_S, "the announced node has ended")
        finally:
            clients.finish()
        assert "a node of Ray is announced to go" in tandem("logs", *of_cluster).stdout

        # The lowest number stays.
        assert tandem("scale", *of_cluster, "--workers", "1").returncode == 0
        wait_until(lambda: nodes(autoscaled) == [], NODE_GONE_S, "the idle node has ended")
        assert workers(server) == ["worker-0"]
    finally:
        finish(server)


def nodes(ray: JoinableRay) -> list[str]:
    return [node_id for node_id in map(fake_node, range(1, 10)) if ray.has_fake_node(node_id)]

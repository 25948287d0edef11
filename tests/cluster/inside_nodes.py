"""What test_nodes.py runs on the first of two nodes."""

import os
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from deploy.cluster_config import ClusterConfig
from router.config import host_of
from tandem.client import TandemClient
from tests.cluster.conftest import Answer, Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import LiveStream
from tests.cluster.test_cancel import leave_early
from tests.cluster.two_hosts import HEAD, OTHER, RAY_PORT, Cable, ip

NUM_PROMPTS = 24
NUM_TOKENS = 24
NUM_CUTS = int(os.environ.get("TANDEM_TEST_CUTS", "20"))
# Shorter than Ray waits before it gives a node up.
CUT_S = (0.5, 6.0)
# For two routers and four workers to find each other again.
HEALED_S = 20.0
NUM_CLIENTS = 6
NUM_CANCELLED = 60


@pytest.fixture(scope="module")
def config(tiny_config: ClusterConfig) -> ClusterConfig:
    return replace(
        tiny_config, ray_address=f"{HEAD}:{RAY_PORT}", placement_strategy="spread", host="0.0.0.0", num_routers=2
    )


@pytest.fixture
def served(clusters: Clusters, config: ClusterConfig) -> Iterator[ServedCluster]:
    """A prefill worker on the first node, a decode worker on the other, a router on each."""
    found = clusters.get(config)
    yield found
    found.wait_clean()


def greedy(client: TandemClient, served: ServedCluster, prompt: Sequence[int]) -> list[int]:
    answer = Answer()
    for response in client.generate(served.request(prompt, max_tokens=NUM_TOKENS), timeout_s=30.0):
        answer.add(response)
    assert answer.last.finish_reason
    return answer.token_ids


def test_prompts_of_one_node_are_decoded_on_the_other(served: ServedCluster, tiny_oracle: Oracle) -> None:
    info = served.client.server_info()
    assert {worker.worker_id: host_of(worker.address) for worker in info.workers} == {
        "prefill-0": HEAD,
        "decode-0": OTHER,
    }
    # Everybody is told where both routers are, and each serves.
    assert [host_of(router.grpc_address) for router in info.routers] == [HEAD, OTHER]
    rng = random.Random(0)
    for router in info.routers:
        prompts = [random_ids(rng, rng.randint(1, 300)) for _ in range(NUM_PROMPTS)]
        with TandemClient(router.grpc_address, one_router=True) as client, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: greedy(client, served, prompt), prompts))
        assert answers == [tiny_oracle.generate(prompt, NUM_TOKENS) for prompt in prompts]
    prefill = next(worker for worker in served.client.server_info().workers if worker.worker_id == "prefill-0")
    assert {shipped.transport for shipped in prefill.stats.shipped} == {"tcp"}

    stems = [random_ids(rng, 300) for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        assert any(pool.map(lambda seed: leave_early(served, stems, seed), map(str, range(NUM_CANCELLED))))
    served.wait_clean()


@pytest.fixture
def two_pairs(clusters: Clusters, config: ClusterConfig) -> Iterator[ServedCluster]:
    """A prefill and a decode worker and a router on each node."""
    found = clusters.get(replace(config, num_prefill=2, num_decode=2))
    wait_until(lambda: has_all_links(found), HEALED_S, "every worker has its links")
    yield found
    found.wait_clean(within_s=HEALED_S)


def has_all_links(served: ServedCluster) -> bool:
    workers = served.client.server_info().workers
    return len(workers) == 4 and all(w.alive for w in workers) and sum(len(w.linked_to) for w in workers) == 4


class Load:
    """Clients that ask for one output after the other, until they are told to stop."""

    def __init__(self, served: ServedCluster, client: TandemClient) -> None:
        self.streams: list[LiveStream] = []
        self._served, self._client = served, client
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[LiveStream]:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.streams

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            prompt = random_ids(rng, rng.randint(1, 200))
            stream = LiveStream(
                self._served, prompt, client=self._client, max_tokens=rng.randint(20, 200), ignore_eos=True
            )
            self.streams.append(stream)
            stream.wait_tokens(10**9)
            if stream.error is not None:
                time.sleep(0.1)


def set_link(state: str) -> None:
    """Of the other node. Its kernel knows."""
    namespace, interface = os.environ["TANDEM_TEST_OTHER"].split()
    ip("-n", namespace, "link", "set", interface, state)


def the_cable() -> Cable:
    return Cable(*os.environ["TANDEM_TEST_CABLE"].split())


def test_a_cable_is_cut_and_mended(two_pairs: ServedCluster, tiny_oracle: Oracle) -> None:
    """Everybody on the first node has there all that a stream needs, so none may end in an error."""
    served = two_pairs
    rng = random.Random(1)
    healed: list[float] = []
    with TandemClient(served.cluster.routers["router-0"].grpc, one_router=True) as client:
        load = Load(served, client)
        try:
            for number in range(NUM_CUTS):
                cut_s = rng.uniform(*CUT_S)
                is_silent = number % 2 == 0
                the_cable().cut() if is_silent else set_link("down")
                time.sleep(cut_s)
                the_cable().mend() if is_silent else set_link("up")
                mended = time.monotonic()
                wait_until(lambda: has_all_links(served), HEALED_S, f"all have their links after {cut_s:.1f} s")
                healed.append(time.monotonic() - mended)
                kind = "silent" if is_silent else "told"
                print(f"cut {number}, {kind}: {cut_s:.1f} s; whole again {healed[-1]:.1f} s later", flush=True)
                time.sleep(rng.uniform(0.5, 2.0))
        finally:
            the_cable().mend()
            set_link("up")
            streams = load.finish()
    errors = [str(stream.error) for stream in streams if stream.error is not None]
    gaps = sorted(stream.longest_gap() for stream in streams)
    print(
        f"{len(streams)} streams, {len(errors)} errors; a stream's longest wait: median "
        f"{statistics.median(gaps):.2f} s, 90 % {gaps[int(0.9 * len(gaps))]:.2f} s, largest {gaps[-1]:.2f} s; whole "
        f"again after {statistics.median(healed):.1f} s in the median, {max(healed):.1f} s at most"
    )
    assert errors == []
    for stream in streams:
        assert len(stream.answer.token_ids) == stream.sampling["max_tokens"]
        assert tiny_oracle.confirms(stream.prompt_ids, stream.answer.token_ids)

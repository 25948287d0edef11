"""Tests that test_nodes.py runs on the first of two nodes."""

import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tandem.client import TandemClient
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.router.config import host_of
from tests.cluster.command import own_name, tandem
from tests.cluster.conftest import Answer, Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import LiveStream
from tests.cluster.test_cancel import leave_early
from tests.cluster.two_hosts import HEAD, NODE_START_S, OTHER, RAY_PORT, Cable, Node, ip

pytestmark = pytest.mark.timeout(550)

NUM_PROMPTS = 24
NUM_TOKENS = 24
NUM_CUTS = int(os.environ.get("TANDEM_TEST_CUTS", "20"))
# Shorter than Ray's timeout for a silent node.
CUT_S = (0.5, 6.0)
# Lets TCP retransmit after each cut: Ray relies on that alone.
MENDED_S = (6.0, 9.0)
# Time for all workers and routers to reconnect.
HEALED_S = 20.0
NUM_CLIENTS = 6
# The logits are of order 10, in float32.
ROUNDING = 1e-3
# Ray detects a dead node only by its silence.
NODE_GONE_S = 90.0
RESTARTED_S = 120.0
NUM_CANCELLED = 60
# A supervisor polls its routers every second.
LOGGED_S = 10.0


@pytest.fixture(scope="module")
def config(tiny_config: ClusterConfig) -> ClusterConfig:
    return replace(
        tiny_config, ray_address=f"{HEAD}:{RAY_PORT}", placement_strategy="spread", host="0.0.0.0", num_routers=2
    )


@pytest.fixture
def served(clusters: Clusters, config: ClusterConfig) -> Iterator[ServedCluster]:
    """One prefill worker on the first node, one decode worker on the other, a router on each."""
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
    assert {worker.worker_id: worker.rack for worker in info.workers} == {
        "prefill-0": f"of-{HEAD}",
        "decode-0": f"of-{OTHER}",
    }
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
    """A prefill worker, a decode worker and a router on each node."""
    found = start_two_pairs(clusters, config)
    yield found
    found.wait_clean(within_s=HEALED_S)


def start_two_pairs(clusters: Clusters, config: ClusterConfig) -> ServedCluster:
    found = clusters.get(replace(config, num_prefill=2, num_decode=2))
    wait_until(lambda: has_all_links(found), HEALED_S, "every worker has its links")
    return found


def has_all_links(served: ServedCluster) -> bool:
    workers = served.client.server_info().workers
    return len(workers) == 4 and all(w.alive for w in workers) and sum(len(w.linked_to) for w in workers) == 4


def test_idle_cluster_ships_within_hosts(two_pairs: ServedCluster, config: ClusterConfig) -> None:
    def num_shipped(transport: str) -> int:
        workers = two_pairs.client.server_info().workers
        return sum(s.num_pages for w in workers for s in w.stats.shipped if s.transport == transport)

    rng = random.Random(1)
    before = num_shipped("tcp")
    for router in two_pairs.client.server_info().routers:
        with TandemClient(router.grpc_address, one_router=True) as client:
            for _ in range(10):
                greedy(client, two_pairs, random_ids(rng, 100))
    least = 20 * (100 // config.page_size)
    wait_until(lambda: num_shipped("shared_memory") >= least, HEALED_S, "all pages were shipped within a host")
    assert num_shipped("tcp") == before


class Load:
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


def check(streams: Sequence[LiveStream], oracle: Oracle) -> None:
    """Assert that every stream finished with exactly its greedy tokens."""
    errors = [str(stream.error) for stream in streams if stream.error is not None]
    gaps = sorted(stream.longest_gap() for stream in streams)
    print(
        f"{len(streams)} streams, {len(errors)} errors; a stream's longest wait: median "
        f"{statistics.median(gaps):.2f} s, 90 % {gaps[int(0.9 * len(gaps))]:.2f} s, largest {gaps[-1]:.2f} s"
    )
    assert errors == []
    worst = 0.0
    for stream in streams:
        output_ids = stream.answer.token_ids
        assert len(output_ids) == stream.sampling["max_tokens"]
        # Accept a token whose logit ties with the best within rounding.
        logits = oracle.logits([*stream.prompt_ids, *output_ids])[len(stream.prompt_ids) - 1 : -1]
        short = logits.max(-1).values - logits.gather(-1, torch.tensor(output_ids)[:, None])[:, 0]
        worst = max(worst, float(short.max()))
        assert worst < ROUNDING, (stream.prompt_ids, output_ids, short.tolist())
    print(f"no token's logit is further than {worst:.1e} below the best")


def set_link(state: str) -> None:
    """Set the other node's interface "up" or "down"."""
    namespace, interface = os.environ["TANDEM_TEST_OTHER"].split()
    ip("-n", namespace, "link", "set", interface, state)


def the_cable() -> Cable:
    return Cable(*os.environ["TANDEM_TEST_CABLE"].split())


def test_cable_cut_and_mended(two_pairs: ServedCluster, tiny_oracle: Oracle) -> None:
    """The first node has both kinds of workers, so no stream may fail."""
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
                time.sleep(rng.uniform(*MENDED_S))
        finally:
            the_cable().mend()
            set_link("up")
            streams = load.finish()
    check(streams, tiny_oracle)
    print(f"whole again after {statistics.median(healed):.1f} s in the median, {max(healed):.1f} s at most")


def test_node_lost_and_restored(clusters: Clusters, config: ClusterConfig, tiny_oracle: Oracle) -> None:
    """Lost processes wait for a new node: this one is full. Its own streams continue."""
    served = start_two_pairs(clusters, config)
    namespace, interface = os.environ["TANDEM_TEST_OTHER"].split()
    with (
        TandemClient(served.cluster.routers["router-0"].grpc, one_router=True) as client,
        tempfile.TemporaryDirectory(prefix="rayc-", dir="/tmp", ignore_cleanup_errors=True) as directory,
    ):
        load = Load(served, client)
        again = Node(namespace, interface, OTHER, Path(directory), Path(os.environ["TANDEM_TEST_DISKS"].split()[0]))
        try:
            time.sleep(2.0)
            lost_at = time.monotonic()
            # Only the other node runs in that namespace.
            pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
            for pid in map(int, pids.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            placement = served.cluster._nodes
            assert placement is not None
            gone = ("prefill-1", "decode-1", "router-1")
            wait_until(lambda: not any(map(placement.is_placed, gone)), NODE_GONE_S, "Ray has noticed it")
            print(f"Ray gave the node up after {time.monotonic() - lost_at:.1f} s", flush=True)
            assert all(map(placement.is_placed, ("prefill-0", "decode-0", "router-0")))
            num_streams = len(load.streams)
            wait_until(lambda: len(load.streams) > num_streams + NUM_CLIENTS, HEALED_S, "others are served")

            again.start()
            wait_until(again.is_up, NODE_START_S, "its Ray is up again")
            back_at = time.monotonic()
            wait_until(lambda: has_all_links(served), RESTARTED_S, "its workers are back")
            wait_until(lambda: all(r.alive for r in client.server_info().routers), RESTARTED_S, "its router is back")
            print(f"all is as before {time.monotonic() - back_at:.1f} s after the node was", flush=True)
            streams = load.finish()
            check(streams, tiny_oracle)
            with TandemClient(served.cluster.routers["router-1"].grpc, one_router=True) as other:
                prompt = random_ids(random.Random(2), 40)
                assert greedy(other, served, prompt) == tiny_oracle.generate(prompt, NUM_TOKENS)
            served.wait_clean(within_s=HEALED_S)
        finally:
            load.finish()
            # Stopping does not wait for a lost node.
            again.end()
            began = time.monotonic()
            clusters.close()
            print(f"ended after {time.monotonic() - began:.1f} s")


def test_logs_come_from_either_node(tiny_model_dir: Path) -> None:
    _, name = own_name()
    on = ("--ray-address", f"{HEAD}:{RAY_PORT}")
    flags = ("--model", str(tiny_model_dir), "--threads", "1", "--num-pages", "128", "--log-requests")
    where = ("--placement-strategy", "spread", "--host", "0.0.0.0", "--routers", "2", "--grpc-port", "0")
    started = tandem("serve", "--name", name, "--detach", *on, *flags, *where, "--http-port", "0")
    assert started.returncode == 0, started.stderr
    try:
        found = re.search(r"over gRPC at \S+?:(\d+)", started.stdout)
        assert found is not None
        for host in (HEAD, OTHER):
            with TandemClient(f"{host}:{found[1]}", one_router=True) as client:
                assert len(list(client.complete("hello", max_tokens=4))) > 0
        wait_until(
            lambda: {"router-0", "router-1"} <= {line.split()[1] for line in request_lines(name, on)},
            LOGGED_S,
            "lines of both routers",
        )
        of_worker = tandem("logs", name, "decode-0", *on).stdout
        assert "engine ready" in of_worker and not of_worker.startswith(":")
        missing = tandem("logs", name, "decode-7", *on)
        assert missing.returncode == 1 and "prefill-0, router-0, router-1" in missing.stderr

        # The logs include earlier incarnations. Ray decides which worker runs there.
        (dead,) = [p.pid for p in psutil.process_iter() if is_worker_at(p, OTHER)]
        os.kill(dead, signal.SIGKILL)
        wait_until(
            lambda: any(
                tandem("logs", name, worker, *on).stdout.count(f"--- {worker} on") >= 2
                for worker in ("prefill-0", "decode-0")
            ),
            RESTARTED_S,
            "the logs of both of its lives",
        )
    finally:
        assert tandem("stop", name, *on).returncode == 0


def request_lines(name: str, on: Sequence[str]) -> list[str]:
    return [line for line in tandem("logs", name, *on).stdout.splitlines() if " > " in line or " < " in line]


def is_worker_at(process: psutil.Process, host: str) -> bool:
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        if "ray::WorkerActor" in " ".join(process.cmdline()):
            return parent is not None and f"--node_ip_address={host}" in parent.cmdline()
    return False

"""Tests of a page store on each node that test_nodes.py runs on the first of two nodes."""

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.run_record import default_directory
from tandem.router.config import host_of
from tandem.v1 import inference_pb2 as pb
from tests.cluster.command import GONE_S, own_name, tandem
from tests.cluster.conftest import Answer, Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.test_page_store import pid_of, regions_of
from tests.cluster.two_hosts import HEAD, OTHER, RAY_PORT

pytestmark = pytest.mark.timeout(250)

NUM_PROMPTS = 8
PROMPT_TOKENS = 320
PAGES_PER_PROMPT = PROMPT_TOKENS // 16
NUM_TOKENS = 16
STORED_S = 20.0
RESTARTED_S = 60.0


@pytest.fixture
def served(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    """A worker of role both, a router and a page store on each node. Requests take turns."""
    config = replace(
        tiny_config,
        ray_address=f"{HEAD}:{RAY_PORT}",
        placement_strategy="spread",
        host="0.0.0.0",
        num_prefill=0,
        num_decode=0,
        num_both=2,
        num_routers=2,
        routing="round_robin",
        store_memory="16MiB",
    )
    found = clusters.get(config)
    yield found
    found.wait_clean()


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    rng = random.Random(request.node.name)
    return [random_ids(rng, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]


def serve(served: ServedCluster, oracle: Oracle, prompts: list[list[int]]) -> list[Answer]:
    answers = [served.complete(ids, max_tokens=NUM_TOKENS) for ids in prompts]
    assert [answer.token_ids for answer in answers] == [oracle.generate(ids, NUM_TOKENS) for ids in prompts]
    return answers


def stores(served: ServedCluster) -> dict[str, pb.StoreStatus]:
    return {store.store_id: store for store in served.client.server_info().stores if store.alive}


def wait_stored(served: ServedCluster, num_pages: int) -> None:
    wait_until(
        lambda: sum(store.num_host_pages for store in stores(served).values()) >= num_pages,
        STORED_S,
        "all pages are in the stores",
    )


def test_pages_of_one_node_are_loaded_on_the_other(
    served: ServedCluster, tiny_oracle: Oracle, prompts: list[list[int]]
) -> None:
    wait_until(lambda: len(stores(served)) == 2, STORED_S, "both stores are known")
    assert {name: host_of(store.address) for name, store in stores(served).items()} == {
        "store-0": HEAD,
        "store-1": OTHER,
    }
    own = [regions_of(store.pid) for store in stores(served).values()]
    assert len(own[0] | own[1]) == 2 and all(len(region) == 1 for region in own)
    by_host = {host_of(store.address): regions_of(store.pid) for store in stores(served).values()}
    for worker in served.client.server_info().workers:
        assert regions_of(worker.pid) == by_host[host_of(worker.address)]

    serve(served, tiny_oracle, prompts)
    wait_stored(served, NUM_PROMPTS * PAGES_PER_PROMPT)
    # Then each prompt is the other worker's.
    serve(served, tiny_oracle, [prompts[0][:40]])
    again = serve(served, tiny_oracle, prompts)
    assert sum(answer.last.usage.peer_tokens for answer in again) >= PROMPT_TOKENS // 2
    served.wait_clean()


def test_a_killed_store_comes_back_on_its_node(
    served: ServedCluster, tiny_oracle: Oracle, prompts: list[list[int]]
) -> None:
    wait_until(lambda: len(stores(served)) == 2, STORED_S, "both stores are known")
    before = stores(served)["store-1"]
    region = regions_of(before.pid)
    os.kill(before.pid, signal.SIGKILL)
    serve(served, tiny_oracle, prompts)
    wait_until(lambda: stores(served).get("store-1", before).pid != before.pid, RESTARTED_S, "the killed store is back")
    after = stores(served)["store-1"]
    assert after.address == before.address and regions_of(after.pid) == region
    serve(served, tiny_oracle, prompts[:2])


def test_lost_memory_is_replaced_for_new_processes_only(
    served: ServedCluster, tiny_oracle: Oracle, prompts: list[list[int]]
) -> None:
    wait_until(lambda: len(stores(served)) == 2, STORED_S, "both stores are known")
    before = stores(served)["store-1"]
    lost = regions_of(before.pid)
    node_stores = served.cluster._node_stores
    assert node_stores is not None
    keeper = node_stores.actors()[1]
    os.kill(ray.get(keeper.__ray_call__.remote(lambda actor: os.getpid())), signal.SIGKILL)
    os.kill(before.pid, signal.SIGKILL)

    def new_pid() -> int:
        try:
            return pid_of(served, "store-1")
        except ray.exceptions.RayError:
            return before.pid

    wait_until(lambda: new_pid() != before.pid, RESTARTED_S, "the store has started")
    wait_until(lambda: regions_of(new_pid()) - lost, RESTARTED_S, "it has other memory")
    region = regions_of(new_pid())
    assert region.isdisjoint(lost)
    worker = next(w for w in served.client.server_info().workers if host_of(w.address) == OTHER)
    assert regions_of(worker.pid) == lost
    serve(served, tiny_oracle, prompts)
    assert "store-1" not in stores(served), "a worker with the lost memory has no session"
    served.kill(worker.worker_id)

    def is_back() -> bool:
        found = served.worker(worker.worker_id)
        return found is not None and found.alive and found.pid != worker.pid

    wait_until(is_back, RESTARTED_S, "the worker is back")
    again = served.worker(worker.worker_id)
    assert again is not None and regions_of(again.pid) == region
    wait_until(lambda: "store-1" in stores(served), STORED_S, "the store has its session")
    serve(served, tiny_oracle, prompts)
    wait_until(lambda: stores(served)["store-1"].num_host_pages > 0, STORED_S, "its pages are stored again")
    assert stores(served)["store-1"].address == before.address


def test_a_new_supervisor_takes_the_stores_over(clusters: Clusters, tiny_model_dir: Path) -> None:
    # The nodes have room for one cluster.
    clusters.close()
    sockets = set(default_directory().glob("*.region"))
    _, name = own_name()
    on = ("--ray-address", f"{HEAD}:{RAY_PORT}")
    flags = ("--model", str(tiny_model_dir), "--threads", "1", "--num-pages", "128", "--both", "2")
    where = ("--placement-strategy", "spread", "--host", "0.0.0.0", "--grpc-port", "0", "--http-port", "0")
    disk, *own_disks = map(Path, os.environ["TANDEM_TEST_DISKS"].split())
    stored = ("--store-memory", "16MiB", "--store-disk", f"{disk}/pages:64MiB")
    started = tandem("serve", "--name", name, "--detach", *on, *flags, *where, *stored)
    assert started.returncode == 0, started.stderr
    try:

        def pids() -> dict[str, int]:
            shown = tandem("status", name, *on, "--json")
            if shown.returncode:
                return {}
            return {store["store_id"]: store["pid"] for store in json.loads(shown.stdout)["stores"] if store["alive"]}

        wait_until(lambda: len(pids()) == 2, STORED_S, "both stores are known")
        assert len({(own / "pages" / "secret").read_bytes() for own in own_disks}) == 1
        before = pids()
        (supervisor,) = pids_of("ray::SupervisorActor")
        os.kill(supervisor, signal.SIGKILL)
        wait_until(
            lambda: tandem("restart", name, "store-1", *on).returncode == 0, RESTARTED_S, "a new supervisor restarts it"
        )
        wait_until(lambda: pids().get("store-1", before["store-1"]) != before["store-1"], STORED_S, "it is back")
        after = pids()
        assert after["store-0"] == before["store-0"]
        assert regions_of(after["store-1"]) != regions_of(after["store-0"])
        assert all(len(regions_of(pid)) == 1 for pid in after.values())
    finally:
        stopped = tandem("stop", name, *on)
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: not pids_of("ray::RegionKeeper", "ray::StoreActor"), GONE_S, "nothing is left of the stores")
    assert set(default_directory().glob("*.region")) <= sockets


def pids_of(*titles: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(titles):
                found.append(process.pid)
    return found

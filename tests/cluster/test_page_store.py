"""The page store of a cluster: pages that pools evicted, deaths of the store and of workers."""

import contextlib
import os
import random
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.rpc.auth import cluster_metadata
from tandem.v1 import store_pb2_grpc, worker_pb2
from tests.cluster.conftest import (
    MAX_MODEL_LEN,
    RESTART_S,
    Answer,
    Clusters,
    Oracle,
    ServedCluster,
    random_ids,
    wait_until,
)
from tests.cluster.inside import open_inside

pytestmark = pytest.mark.timeout(300)
STORE = "store-0"
NUM_PROMPTS = 8
PROMPT_TOKENS = 160
NUM_TOKENS = 24
# The prompts together need more than twice as many.
NUM_PAGES = MAX_MODEL_LEN // 16 + 8
REGION_NAME = "/memfd:tandem-page-store (deleted)"


def with_store(tiny_config: ClusterConfig) -> ClusterConfig:
    return replace(tiny_config, num_pages=NUM_PAGES, store_memory="16MiB")


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)], ids="prefill_tp_{}".format)
def served(request: pytest.FixtureRequest, clusters: Clusters, tiny_config: ClusterConfig) -> ServedCluster:
    """Workers of one rank, or of unequal degrees."""
    degree = {"prefill_tp": request.param} if request.param > 1 else {}
    return clusters.get(replace(with_store(tiny_config), num_prefill=1, num_decode=1, **degree))


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> list[list[int]]:
    """New prompts for each test."""
    rng = random.Random(request.node.name)
    return [random_ids(rng, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]


def serve(served: ServedCluster, oracle: Oracle, prompts: Sequence[list[int]]) -> list[Answer]:
    answers = [served.complete(ids, max_tokens=NUM_TOKENS) for ids in prompts]
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle.generate(ids, NUM_TOKENS)
    return answers


def store_metrics(served: ServedCluster) -> dict[str, float]:
    """Returns the store's metrics by name, with the label besides its own: "slots.ready"."""
    with open_inside(served.cluster, served.cluster.store_address) as channel:
        admin = store_pb2_grpc.StoreAdminStub(channel)
        metadata = cluster_metadata(served.cluster.cluster_token)
        text = admin.ReadMetrics(worker_pb2.ReadMetricsRequest(), timeout=5.0, metadata=metadata).text.decode()
        report = admin.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), timeout=5.0, metadata=metadata)
        assert report.violation == ""
    metrics = {}
    for name, labels, number in re.findall(r"^tandem_store_(\w+)\{(.*)\} (.*)$", text, re.MULTILINE):
        metrics[".".join([name, *re.findall(r'"(?!store-0)(\w+)"', labels)])] = float(number)
    return metrics


def loaded_at_prefill(served: ServedCluster) -> int:
    """Returns the prompt tokens that the prefill worker has loaded from the store's memory."""
    worker = served.worker("prefill-0")
    assert worker is not None
    return worker.stats.prefix_host_tokens


def serve_and_store(served: ServedCluster, oracle: Oracle, prompts: Sequence[list[int]]) -> None:
    """Waits for each prompt's pages to be stored, before the next evict them."""
    for ids in prompts:
        num_before = store_metrics(served).get("slots.ready", 0)
        serve(served, oracle, [ids])
        wait_until(
            lambda: store_metrics(served).get("slots.ready", 0) >= num_before + len(ids) // 16,  # noqa: B023
            20.0,
            "the prompt's pages are stored",
        )


def pid_of(served: ServedCluster, name: str) -> int:
    pid: int = ray.get(served.cluster.actor(name).__ray_call__.remote(lambda actor: os.getpid()))
    return pid


def regions_of(pid: int) -> set[int]:
    """Returns the inodes of the regions that a process has open or mapped."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        # The listing's own descriptor is gone by now.
        with contextlib.suppress(FileNotFoundError):
            if str(fd.readlink()) == REGION_NAME:
                found.add(fd.stat().st_ino)
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return found | {int(line.split()[4]) for line in lines if line.endswith(REGION_NAME)}


def test_pages_that_the_pool_evicted_come_back_from_the_store(
    served: ServedCluster, tiny_oracle: Oracle, prompts: list[list[int]]
) -> None:
    serve_and_store(served, tiny_oracle, prompts)
    before = store_metrics(served)
    before_loads = loaded_at_prefill(served)
    again = serve(served, tiny_oracle, prompts)
    after = store_metrics(served)
    assert after["hit_pages_total.host"] > before["hit_pages_total.host"]
    # All but the last token of a prompt may be loaded; the pool of a worker alone holds less than half of them.
    num_cached = sum(answer.last.usage.cached_tokens for answer in again)
    assert num_cached > NUM_PROMPTS * PROMPT_TOKENS * 3 // 4
    served.wait_clean()
    # Clients and operators see the same.
    loaded = [usage.host_tokens for usage in (answer.last.usage for answer in again)]
    assert num_cached // 2 < sum(loaded) <= num_cached
    wait_until(lambda: loaded_at_prefill(served) - before_loads == sum(loaded), 5.0, "the worker tells its hits")


def test_a_killed_store_comes_back_with_the_same_memory(
    served: ServedCluster, tiny_oracle: Oracle, prompts: list[list[int]]
) -> None:
    serve_and_store(served, tiny_oracle, prompts)
    store, own = pid_of(served, STORE), regions_of(os.getpid())
    assert len(own) == 1 and regions_of(store) == own
    os.kill(store, signal.SIGKILL)
    # Without a store, workers serve as before.
    serve(served, tiny_oracle, prompts[:2])

    def is_back() -> bool:
        try:
            return pid_of(served, STORE) != store and store_metrics(served).get("sessions") == 2
        except Exception:
            return False

    wait_until(is_back, RESTART_S, "the store is back")
    assert regions_of(os.getpid()) == regions_of(pid_of(served, STORE)) == own
    for worker in served.client.server_info().workers:
        assert regions_of(worker.pid) == own
    serve(served, tiny_oracle, prompts)
    wait_until(lambda: store_metrics(served)["slots.ready"] >= PROMPT_TOKENS // 16, 20.0, "pages are stored again")
    served.wait_clean()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_restarted_worker_starts_warm(
    role: str, served: ServedCluster, tiny_oracle: Oracle, prompts: list[list[int]]
) -> None:
    serve_and_store(served, tiny_oracle, prompts)
    pid = served.kill(f"{role}-0")

    def is_back() -> bool:
        worker = served.worker(f"{role}-0")
        return worker is not None and worker.pid != pid and served.client.server_info().ready

    wait_until(is_back, RESTART_S, "the worker is back")
    wait_until(lambda: store_metrics(served).get("sessions") == 2, RESTART_S, "its session is open")
    before = store_metrics(served)["hit_pages_total.host"]
    serve(served, tiny_oracle, prompts[:3])
    assert store_metrics(served)["hit_pages_total.host"] - before >= 3 * (PROMPT_TOKENS // 16 - 1)
    served.wait_clean()

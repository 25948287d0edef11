"""Kills of the page store and of a worker while copies between pool and region are queued on the GPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle
from tests.cluster.store_kills import StoreKillDrill, kills_of, with_store

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.mark.parametrize(
    ("worker_id", "workers_per_gpu"),
    [pytest.param("both-0", 1, id="both"), pytest.param("prefill-0", 2, id="1p1d")],
)
def test_kills_under_queued_copies_change_nothing(
    clusters: Clusters,
    cuda_config: ClusterConfig,
    worker_id: str,
    workers_per_gpu: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = clusters.get(with_store(replace(cuda_config, workers_per_gpu=workers_per_gpu), worker_id))
    drill = StoreKillDrill(served, Oracle(Path(cuda_config.model)), worker_id)
    for kill in drill.run_all(kills_of(worker_id)):
        with capsys.disabled():
            print(f"\n{kill}", end="", flush=True)

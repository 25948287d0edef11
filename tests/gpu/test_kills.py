"""Kills and stops of a prefill and a decode worker, each on a GPU, during transfers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle
from tests.cluster.kills import KillDrill, config_for

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["nccl", "nvlink"])
def test_ten_kills_during_transfers_change_nothing(
    clusters: Clusters, cuda_config: ClusterConfig, transport: str, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served = clusters.get(config_for(cuda_config, transport))
    for cycle in KillDrill(served, Oracle(Path(cuda_config.model))).run_all(role):
        with capsys.disabled():
            print(f"\n{cycle}", end="", flush=True)

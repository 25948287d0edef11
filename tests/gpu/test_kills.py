"""Kills and stops of a prefill and a decode worker during transfers, on one GPU and on two."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle
from tests.cluster.kills import Cycle, KillDrill, config_for

pytestmark = pytest.mark.timeout(400)
NUM_KILLS_AT_ONCE = 10


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


def show(cycles: Iterator[Cycle], capsys: pytest.CaptureFixture[str]) -> None:
    for cycle in cycles:
        with capsys.disabled():
            print(f"\n{cycle}", end="", flush=True)


@pytest.mark.parametrize("part", ["first", "second"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_twenty_kills_on_one_gpu_change_nothing(
    clusters: Clusters, cuda_config: ClusterConfig, role: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served = clusters.get(config_for(replace(cuda_config, workers_per_gpu=2), "auto"))
    drill = KillDrill(served, Oracle(Path(cuda_config.model)))
    show(drill.run_kills(role, NUM_KILLS_AT_ONCE), capsys)
    (shipped,) = served.integrity()["prefill-0"].stats.shipped
    assert shipped.transport == "nvlink"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("transport", ["nccl", "nvlink"])
def test_ten_kills_between_two_gpus_change_nothing(
    clusters: Clusters, cuda_config: ClusterConfig, transport: str, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served = clusters.get(config_for(cuda_config, transport))
    show(KillDrill(served, Oracle(Path(cuda_config.model))).run_all(role), capsys)

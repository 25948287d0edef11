"""Kills and stops of either worker during TCP transfers. tests/gpu/test_kills.py covers NCCL."""

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle
from tests.cluster.kills import KillDrill, config_for


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ten_kills_during_transfers_change_nothing(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    served = clusters.get(config_for(tiny_config, "tcp"))
    for cycle in KillDrill(served, tiny_oracle).run_all(role):
        with capsys.disabled():
            print(f"\n{cycle}", end="", flush=True)

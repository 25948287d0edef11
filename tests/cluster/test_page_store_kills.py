"""Kills of the page store and of a worker under queued copies change no token and leak nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle, save_tiny_model
from tests.cluster.store_kills import StoreKillDrill, kills_of, with_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
# Layers so wide that computing takes longer than loading.
WIDTH = 16384


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "wide-llama"
    save_tiny_model(directory, intermediate_size=WIDTH)
    return directory


@pytest.mark.parametrize("worker_id", ["both-0", "prefill-0"])
def test_kills_under_queued_copies_change_nothing(
    clusters: Clusters, tiny_config: ClusterConfig, wide_model_dir: Path, worker_id: str
) -> None:
    config = with_store(replace(tiny_config, model=str(wide_model_dir)), worker_id)
    drill = StoreKillDrill(clusters.get(config), Oracle(wide_model_dir), worker_id)
    for kill in drill.run_all(kills_of(worker_id)):
        print(kill)

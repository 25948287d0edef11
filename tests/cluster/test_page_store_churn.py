"""Ten million tokens through a cluster with a page store: the memory of every process is flat."""

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import VOCAB_SIZE, Clusters, ServedCluster
from tests.cluster.conversations import TIMEOUT_S, Hits, wait_store
from tests.cluster.faults import Footprints
from tests.cluster.test_page_store import STORE, pid_of

NUM_TOKENS = int(os.environ.get("TANDEM_CHURN_TOKENS", 10_000_000))
MAX_MODEL_LEN = 2048
PROMPT_TOKENS = (256, 2000)
# Of 2,000 tokens each. Pools hold three of them, the store's memory ten, the disk half of them.
NUM_DOCUMENTS = 100
NUM_PAGES = 400
STORE_MEMORY = "10MiB"
DISK_BYTES = "50MiB"
NUM_CLIENTS = 4
NUM_SAMPLES = 40


class StoredFootprints(Footprints):
    """Samples the store too, and this process: launcher, owner of the region, and clients."""

    def __init__(self, served: ServedCluster) -> None:
        super().__init__(served)
        self._store_pid = pid_of(served, STORE)

    def processes(self) -> set[tuple[str, int]]:
        return {*super().processes(), (STORE, self._store_pid), ("launcher", os.getpid())}


@pytest.fixture(scope="module")
def long_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for longer prompts."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama-long"
    shutil.copytree(tiny_model_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_MODEL_LEN}))
    return directory


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_of_all_processes_is_flat(clusters: Clusters, long_model_dir: Path, tmp_path: Path) -> None:
    config = ClusterConfig(
        model=str(long_model_dir),
        num_pages=NUM_PAGES,
        max_model_len=MAX_MODEL_LEN,
        chunk_size=512,
        num_threads=1,
        grpc_port=0,
        http_port=0,
        store_memory=STORE_MEMORY,
        store_disk=f"{tmp_path / 'disk'}:{DISK_BYTES}",
    )
    served = clusters.get(config)
    wait_store(served)
    footprints = StoredFootprints(served)

    def serve(number: int) -> Hits:
        rng = random.Random(number)
        document = random.Random(-1 - rng.randrange(NUM_DOCUMENTS))
        prompt_ids = document.choices(range(VOCAB_SIZE), k=rng.randint(*PROMPT_TOKENS))
        request = served.request(prompt_ids, max_tokens=4, ignore_eos=True)
        *_, last = served.client.generate(request, timeout_s=TIMEOUT_S)
        return Hits.of(last.usage)

    hits, number = Hits(), 0
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        for sample in range(NUM_SAMPLES):
            while hits.prompt < NUM_TOKENS * (sample + 1) / NUM_SAMPLES:
                hits = sum(threads.map(serve, range(number, number + 2 * NUM_CLIENTS)), hits)
                number += 2 * NUM_CLIENTS
            footprints.measure()
    print(number, "requests", hits, "growth (bytes, files)", footprints.growth(), footprints, sep="\n")
    served.wait_clean(TIMEOUT_S)
    footprints.assert_flat()
    # The tiny model often computes sooner than the disk is read.
    assert hits.host > NUM_TOKENS / 50 and hits.disk > NUM_TOKENS / 1000, hits

"""Workers of two ranks on one GPU."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle, random_ids
from tests.cluster.faults import wait_whole
from tests.cluster.rank_drill import PAGE_SIZE, config_for, serve_turns

pytestmark = pytest.mark.timeout(300)
# Of logits; bfloat16 rounds each to 8 bits, and ranks round their parts.
MARGIN = 1.5


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_ranks_of_unequal_degrees_hand_over(
    clusters: Clusters, cuda_config: ClusterConfig, prefill_tp: int, decode_tp: int
) -> None:
    degrees = {"prefill_tp": prefill_tp, "decode_tp": decode_tp}
    served = clusters.get(config_for(cuda_config, device="cuda", workers_per_gpu=3, **degrees))
    wait_whole(served)
    serve_turns(served, Oracle(Path(cuda_config.model)), PAGE_SIZE)
    (shipped,) = served.integrity()["prefill-0"].stats.shipped
    assert shipped.transport == "nvlink" and shipped.num_pages > 0


def test_graphs_of_two_ranks_compute_greedy_tokens(clusters: Clusters, cuda_config: ClusterConfig) -> None:
    """In bfloat16, and the same tokens from cached prefixes."""
    counts = {"num_prefill": 0, "num_decode": 0, "num_both": 1}
    settings = {"dtype": "bfloat16", "chunk_size": 256, "tp": 2, "workers_per_gpu": 2}
    served = clusters.get(config_for(cuda_config, device="cuda", **counts, **settings))
    oracle, rng = Oracle(Path(cuda_config.model)), random.Random(5)
    prompts = [random_ids(rng, rng.randint(1, 200)) for _ in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(2):
            answers = list(pool.map(lambda p: served.complete(p, max_tokens=60, ignore_eos=True), prompts))
            for prompt_ids, answer in zip(prompts, answers, strict=True):
                logits = oracle.logits([*prompt_ids, *answer.token_ids])[len(prompt_ids) - 1 : -1]
                chosen = logits[range(len(logits)), answer.token_ids]
                assert (logits.max(-1).values - chosen).max() < MARGIN
    served.wait_clean()

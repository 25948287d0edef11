"""Clients that leave at any stage leave nothing behind."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest

from tandem.client import TandemError
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.kvtransfer.transports.table import TRANSPORTS
from tests.cluster.conftest import Clusters, Oracle, ServedCluster, random_ids
from tests.cluster.faults import Footprints, wait_whole

NUM_CANCELLED = 300
NUM_ROUNDS = 10


def leave_early(served: ServedCluster, stems: list[list[int]], seed: str) -> bool:
    """Leave a stream early. Returns whether it was still running."""
    rng = random.Random(seed)
    prompt_ids = rng.choice(stems)[: rng.randint(1, 300)] + random_ids(rng, rng.randint(0, 100))
    request = served.request(prompt_ids, max_tokens=110, ignore_eos=True)
    if rng.random() < 0.5:
        with suppress(TandemError):
            list(served.client.generate(request, timeout_s=rng.uniform(0.001, 0.25)))
            return False
        return True
    responses = served.client.generate(request, timeout_s=30.0)
    for _ in range(rng.randint(1, 30)):
        if next(responses).finish_reason:
            return False
    responses.close()
    return True


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS.for_device("cpu"))
@pytest.mark.parametrize("num_each", [1, 2], ids=["1P1D", "2P2D"])
def test_hundreds_of_cancellations_leave_nothing_behind(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle, transport: str, num_each: int
) -> None:
    served = clusters.get(
        replace(tiny_config, chunk_size=16, transport=transport, num_prefill=num_each, num_decode=num_each)
    )
    wait_whole(served)
    rng = random.Random(transport)
    stems = [random_ids(rng, 300) for _ in range(4)]
    footprints = Footprints(served)
    num_cancelled = num_rounds = 0
    while num_cancelled < NUM_CANCELLED or num_rounds < NUM_ROUNDS:
        seeds = [f"{num_rounds} {i}" for i in range(NUM_CANCELLED // NUM_ROUNDS)]
        with ThreadPoolExecutor(8) as pool:
            num_cancelled += sum(pool.map(lambda seed: leave_early(served, stems, seed), seeds))
        num_rounds += 1
        served.wait_clean()
        footprints.measure()
    # Pages cached by cancelled requests must be right.
    for stem in stems:
        assert served.complete(stem).token_ids == tiny_oracle.generate(stem, 24)
    footprints.assert_flat()
    print(num_cancelled, "cancelled; grown by", footprints.growth())

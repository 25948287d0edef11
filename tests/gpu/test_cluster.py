"""A prefill and a decode worker, each on a GPU, with pages over NVLink or NCCL."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import VOCAB_SIZE, Clusters, Oracle

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.mark.parametrize("transport", ["nvlink", "nccl"])
def test_greedy_tokens_in_float32_equal_transformers(
    clusters: Clusters, cuda_config: ClusterConfig, transport: str
) -> None:
    served = clusters.get(replace(cuda_config, dtype="float32", transport=transport))
    oracle = Oracle(Path(cuda_config.model))
    rng = random.Random(1)
    for num_tokens in (1, 2, 15, 16, 17, 48, 64, 100, 200, 400):
        prompt_ids = [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        for _ in range(2):  # First computed, then found in the cache.
            answer = served.complete(prompt_ids, max_tokens=40, ignore_eos=True)
            assert answer.token_ids == oracle.generate(prompt_ids, 40, ignore_eos=True)
            assert answer.last.handover.attempts == 1
    (shipped,) = served.integrity()["prefill-0"].stats.shipped
    assert shipped.transport == transport and shipped.num_pages > 0
    served.wait_clean()


def test_bfloat16_answers_the_same_cold_and_warm(clusters: Clusters, cuda_config: ClusterConfig) -> None:
    served = clusters.get(cuda_config)
    rng = random.Random(2)
    for num_tokens in (17, 100, 400):
        prompt_ids = [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        answers = [served.complete(prompt_ids, max_tokens=20, ignore_eos=True) for _ in range(2)]
        assert [len(a.token_ids) for a in answers] == [20, 20]
    (shipped,) = served.integrity()["prefill-0"].stats.shipped
    assert shipped.transport == "nvlink" and shipped.num_pages > 0
    served.wait_clean()

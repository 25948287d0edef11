"""Embeddings by a worker of role both on one GPU, beside streams whose steps it mixes with prompts."""

import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle, random_ids

pytestmark = pytest.mark.timeout(300)
LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.99}


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_beside_streams(clusters: Clusters, cuda_config: ClusterConfig, dtype: str) -> None:
    served = clusters.get(replace(cuda_config, dtype=dtype, num_prefill=0, num_decode=0, num_both=1))
    oracle = Oracle(Path(cuda_config.model))
    rng = random.Random(1)
    prompts = [random_ids(rng, length) for length in (1, 15, 16, 17, 48, 100, 300, 511, 512, *[30] * 100)]
    streams = [random_ids(rng, 50) for _ in range(4)]
    alone = [served.complete(prompt, max_tokens=200, ignore_eos=True).token_ids for prompt in streams]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(served.complete, prompt, max_tokens=200, ignore_eos=True) for prompt in streams]
        for _ in range(2):  # First computed, then found in the cache.
            responses = served.client.embed(prompts, timeout_s=120.0)
            for prompt, response in zip(prompts, responses, strict=True):
                wanted = oracle.embedding(prompt)
                found = sum(a * b for a, b in zip(response.values, wanted, strict=True))
                assert found > LEAST_COSINE[dtype] and math.hypot(*response.values) == pytest.approx(1.0, abs=1e-3)
        if dtype == "float32":
            assert [answer.result().token_ids for answer in answers] == alone
        else:
            assert all(len(answer.result().token_ids) == 200 for answer in answers)
    served.wait_clean()

"""Pages of latents, and of index keys behind them, between four workers: streams have transformers' tokens, with and
without a cached prefix. test_experts.py has the quick test, between two workers."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.conftest import CHUNK_SIZE, Clusters, random_ids
from tests.cluster.faults import QuickConfig, wait_whole
from tests.cluster.tiny_experts import ClearOracle, save_tiny_experts

STEM_LEN = 101
MAX_TOKENS = 24


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"])
def test_greedy_tokens_behind_pages_of_latents(clusters: Clusters, tmp_path: Path, family: str, page_size: int) -> None:
    directory = tmp_path / f"tiny-{family}"
    save_tiny_experts(directory, family)
    oracle = ClearOracle(directory)
    config = QuickConfig(
        model=str(directory),
        dtype="float32",
        page_size=page_size,
        num_pages=6400 // page_size,
        chunk_size=CHUNK_SIZE,
        num_threads=1,
        grpc_port=0,
        http_port=0,
        num_prefill=2,
        num_decode=2,
        num_both=0,
    )
    served = clusters.get(config)
    wait_whole(served)
    rng = random.Random(4)
    stem = random_ids(rng, STEM_LEN)
    prompts = [stem, random_ids(rng, 17), random_ids(rng, 150), stem + random_ids(rng, 40)]
    assert max(map(len, prompts)) > 2 * CHUNK_SIZE
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: served.complete(prompt, max_tokens=MAX_TOKENS), prompts))
    prompts.append(stem + random_ids(rng, 9))
    answers.append(served.complete(prompts[-1], max_tokens=MAX_TOKENS))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle.generate(prompt, MAX_TOKENS)
    served.wait_clean()

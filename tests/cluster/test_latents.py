"""Pages of latents, and of index keys behind them, between workers: streams have transformers' tokens, with and without
a cached prefix."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.conftest import CHUNK_SIZE, Clusters, random_ids
from tests.cluster.faults import QuickConfig, wait_whole
from tests.cluster.tiny_experts import ClearOracle, save_tiny_experts

STEM_LEN = 101
MAX_TOKENS = 24


@pytest.mark.parametrize(
    ("family", "num_each", "page_size"),
    [
        ("deepseek_v32", 1, 16),
        *(
            pytest.param(family, 2, page_size, marks=pytest.mark.slow)
            for family in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite")
            for page_size in (1, 16)
        ),
    ],
)
def test_greedy_tokens_behind_pages_of_latents(
    clusters: Clusters, tmp_path: Path, family: str, num_each: int, page_size: int
) -> None:
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
        num_prefill=num_each,
        num_decode=num_each,
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
    handover = answers[-1].last.handover
    if num_each == 1:
        whole_pages = STEM_LEN // page_size * page_size
        assert handover.prefill_cached_tokens == handover.decode_cached_tokens == whole_pages
    served.wait_clean()

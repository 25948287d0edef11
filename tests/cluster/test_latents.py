"""Pages of latents between workers: streams have transformers' tokens, with and without a cached prefix."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.conftest import CHUNK_SIZE, Clusters, random_ids
from tests.cluster.faults import QuickConfig, wait_whole
from tests.cluster.tiny_experts import ClearOracle, save_tiny_experts

PAGE_SIZE = 16
MAX_TOKENS = 24


def test_greedy_tokens_behind_pages_of_latents(clusters: Clusters, tmp_path: Path) -> None:
    directory = tmp_path / "tiny-deepseek_v3"
    save_tiny_experts(directory, "deepseek_v3")
    oracle = ClearOracle(directory)
    config = QuickConfig(
        model=str(directory),
        dtype="float32",
        num_pages=400,
        chunk_size=CHUNK_SIZE,
        num_threads=1,
        grpc_port=0,
        http_port=0,
        num_prefill=1,
        num_decode=1,
        num_both=0,
    )
    served = clusters.get(config)
    wait_whole(served)
    rng = random.Random(4)
    stem = random_ids(rng, 6 * PAGE_SIZE + 5)
    prompts = [stem, random_ids(rng, 17), random_ids(rng, 150), stem + random_ids(rng, 40)]
    assert max(map(len, prompts)) > 2 * CHUNK_SIZE
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: served.complete(prompt, max_tokens=MAX_TOKENS), prompts))
    prompts.append(stem + random_ids(rng, 9))
    answers.append(served.complete(prompts[-1], max_tokens=MAX_TOKENS))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle.generate(prompt, MAX_TOKENS)
    handover = answers[-1].last.handover
    assert handover.prefill_cached_tokens == handover.decode_cached_tokens == 6 * PAGE_SIZE
    served.wait_clean()

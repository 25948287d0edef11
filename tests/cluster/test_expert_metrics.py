"""Workers count the tokens of each expert."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.expert_balance import MIN_MEAN
from tests.cluster.conftest import Clusters, ServedCluster, random_ids, wait_until
from tests.cluster.tiny_experts import FAMILIES, save_tiny_experts

FAMILY = "qwen3_moe"
NUM_EXPERTS, NUM_CHOSEN = FAMILIES[FAMILY]["num_experts"], FAMILIES[FAMILY]["num_experts_per_tok"]
MAX_TOKENS = 120
PROMPT_LENGTHS = (200, 131, 17)
LAYERS = ("0-0", "1-1")


@pytest.fixture(scope="module")
def served(
    clusters: Clusters, tiny_config: ClusterConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedCluster]:
    model_dir: Path = tmp_path_factory.mktemp("models") / "tiny-experts"
    save_tiny_experts(model_dir, FAMILY)
    served = clusters.get(replace(tiny_config, model=str(model_dir)))
    yield served
    served.wait_clean()


def scrape(served: ServedCluster, worker_id: str) -> dict[tuple[str, str], float]:
    """Return values by name and layers, without buckets."""
    worker = served.worker(worker_id)
    assert worker is not None
    with build_opener(ProxyHandler({})).open(f"http://{worker.metrics_address}/metrics", timeout=5.0) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {(sample.name, sample.labels.get("layers", "")): sample.value for sample in samples}


def test_every_computed_token_counts_once_per_chosen_expert(served: ServedCluster) -> None:
    rng = random.Random(1)
    prompts = [random_ids(rng, length) for length in PROMPT_LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: served.complete(p, max_tokens=MAX_TOKENS, ignore_eos=True), prompts))
    assert all(len(answer.token_ids) == MAX_TOKENS for answer in answers)
    num_decoded = len(prompts) * (MAX_TOKENS - 1)
    # The last layer computes only the rows that a sampled token follows.
    expected = {"prefill-0": (sum(PROMPT_LENGTHS), len(prompts)), "decode-0": (num_decoded, num_decoded)}
    for worker_id, num_tokens in expected.items():

        def counted(worker_id: str = worker_id) -> list[float]:
            scraped = scrape(served, worker_id)
            return [scraped["tandem_expert_tokens_total", layers] for layers in LAYERS]

        wanted = [NUM_CHOSEN * number for number in num_tokens]
        wait_until(lambda counted=counted, wanted=wanted: counted() == wanted, 10.0, f"{worker_id} counts {wanted}")
    # Once read, counters stand still.
    for worker_id, num_tokens in expected.items():
        scraped = scrape(served, worker_id)
        for layers, number in zip(LAYERS, num_tokens, strict=True):
            num_observed = scraped["tandem_expert_imbalance_count", layers]
            total = scraped["tandem_expert_imbalance_sum", layers]
            most = NUM_CHOSEN * number / NUM_EXPERTS // MIN_MEAN
            assert (num_observed == 0) == (most == 0) and num_observed <= most
            assert num_observed <= total <= num_observed * NUM_EXPERTS / NUM_CHOSEN

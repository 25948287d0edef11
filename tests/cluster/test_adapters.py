"""LoRA adapters over one base model, through a prefill and a decode worker."""

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.adapters import RANKS, AdapterOracle, write_adapters
from tests.cluster.conftest import Answer, Clusters, Oracle, ServedCluster, random_ids

MAX_TOKENS = 12
PAGE_SIZE = 16
ADMIN_KEY = "the-admin-key"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def paths(root: Path, tiny_model_dir: Path) -> Mapping[str, Path]:
    return write_adapters(root, tiny_model_dir)


@pytest.fixture(scope="module")
def oracles(paths: Mapping[str, Path], tiny_model_dir: Path, tiny_oracle: Oracle) -> Mapping[str, Oracle]:
    """By the model's name; "": the base model."""
    return {"": tiny_oracle, **{name: AdapterOracle(tiny_model_dir, path) for name, path in paths.items()}}


@pytest.fixture
def served(
    clusters: Clusters, tiny_config: ClusterConfig, root: Path, paths: Mapping[str, Path]
) -> Iterator[ServedCluster]:
    """Half as many slots as adapters."""
    config = replace(
        tiny_config,
        lora=tuple(f"{name}={path}" for name, path in paths.items()),
        lora_root=str(root),
        admin_keys=(ADMIN_KEY,),
        max_loras=len(RANKS) // 2,
        num_routers=2,
        routing="cache_aware",
    )
    served = clusters.get(config)
    yield served
    served.wait_clean()


def complete(served: ServedCluster, model: str, prompt_ids: list[int], **sampling: Any) -> Answer:
    request = served.request(prompt_ids, **{"max_tokens": MAX_TOKENS, **sampling})
    request.model = model
    answer = Answer()
    for response in served.client.generate(request, timeout_s=60.0):
        answer.add(response)
    assert answer.last.finish_reason
    return answer


def test_one_batch_mixes_adapters_of_all_ranks_and_the_base(
    served: ServedCluster, oracles: Mapping[str, Oracle]
) -> None:
    stem = random_ids(random.Random(1), 40)
    prompts = {model: [*stem, *random_ids(random.Random(n), n)] for n, model in enumerate(oracles)}
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda model: complete(served, model, prompts[model]), prompts)
        for (model, prompt_ids), answer in zip(prompts.items(), answers, strict=True):
            assert answer.token_ids == oracles[model].generate(prompt_ids, MAX_TOKENS), model
            assert answer.last.handover.prefill_cached_tokens == 0, "no page of another adapter is reused"
            assert answer.last.handover.decode_cached_tokens == 0
    for model, prompt_ids in prompts.items():
        answer = complete(served, model, prompt_ids)
        assert answer.last.handover.prefill_cached_tokens >= 2 * PAGE_SIZE, "its own pages are"
        assert answer.token_ids == oracles[model].generate(prompt_ids, MAX_TOKENS)

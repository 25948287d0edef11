"""Adapters together with moves, drafts, the page store, ranks and FP8 pages."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.v1 import inference_pb2 as pb
from tests.cluster.adapters import AdapterOracle, write_adapters
from tests.cluster.conftest import (
    RESTART_S,
    Answer,
    Clusters,
    Oracle,
    ServedCluster,
    random_ids,
    wait_linked,
    wait_until,
)
from tests.cluster.faults import LiveStream, wait_whole
from tests.cluster.rank_drill import config_for
from tests.cluster.test_moves import busiest_worker, leaving, num_moved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = ("rank-3", "rank-8", "rank-16")
MAX_TOKENS = 24
MOVED_TOKENS = 200


class OfModel:
    """A cluster whose requests name a model."""

    def __init__(self, served: ServedCluster, model: str) -> None:
        self.client = served.client
        self._served = served
        self._model = model

    def request(self, *args: Any, **kwargs: Any) -> pb.GenerateRequest:
        request = self._served.request(*args, **kwargs)
        request.model = self._model
        return request

    def complete(self, prompt_ids: list[int]) -> Answer:
        return self.start(prompt_ids, max_tokens=MAX_TOKENS).finish()

    def start(self, prompt_ids: list[int], **sampling: Any) -> LiveStream:
        return LiveStream(self, prompt_ids, **sampling)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Mapping[str, Path]:
    paths = write_adapters(tmp_path_factory.mktemp("adapters"), tiny_model_dir)
    return {name: paths[name] for name in NAMES}


@pytest.fixture(scope="module")
def oracles(paths: Mapping[str, Path], tiny_model_dir: Path, tiny_oracle: Oracle) -> Mapping[str, Oracle]:
    """By the model's name; "": the base model."""
    return {"": tiny_oracle, **{name: AdapterOracle(tiny_model_dir, path) for name, path in paths.items()}}


def with_adapters(config: ClusterConfig, paths: Mapping[str, Path], **options: Any) -> ClusterConfig:
    return replace(config, lora=tuple(f"{name}={path}" for name, path in paths.items()), **options)


@pytest.fixture
def served(clusters: Clusters, tiny_config: ClusterConfig, paths: Mapping[str, Path]) -> ServedCluster:
    """Pools for few prompts beside a store, so that cached pages are evicted and loaded again."""
    counts = {"num_prefill": 0, "num_decode": 0, "num_any": 2}
    served = clusters.get(with_adapters(tiny_config, paths, store_memory="16MiB", speculation="ngram", **counts))
    wait_linked(served)
    return served


def test_moved_streams_keep_their_adapters(served: ServedCluster, oracles: Mapping[str, Oracle]) -> None:
    rng = random.Random(1)
    streams = [
        (model, OfModel(served, model).start(random_ids(rng, 30), max_tokens=MOVED_TOKENS, ignore_eos=True))
        for model in oracles
        for _ in range(2)
    ]
    assert all(stream.wait_tokens(2) for _, stream in streams)
    with leaving(served, busiest_worker(served)):
        answers = [(model, stream, stream.finish()) for model, stream in streams]
    for model, stream, answer in answers:
        assert len(answer.token_ids) == MOVED_TOKENS
        assert oracles[model].confirms(stream.prompt_ids, answer.token_ids), model
    moved = [stream for model, stream in streams if model]
    assert num_moved(moved) > 0, "no stream with an adapter has moved"
    served.wait_clean()


def test_drafts_are_checked_by_the_adapter(served: ServedCluster, oracles: Mapping[str, Oracle]) -> None:
    prompt_ids = random_ids(random.Random(2), 6) * 8
    for model, oracle in oracles.items():
        answer = OfModel(served, model).complete(prompt_ids)
        assert oracle.confirms(prompt_ids, answer.token_ids), model
    drafted = [one for report in served.integrity().values() for one in report.stats.drafted]
    assert sum(one.num_tokens for one in drafted) > 0
    served.wait_clean()


def test_stored_pages_belong_to_the_adapter(served: ServedCluster, oracles: Mapping[str, Oracle]) -> None:
    rng = random.Random(3)
    prompt_ids = random_ids(rng, 160)
    for model, oracle in oracles.items():
        answer = OfModel(served, model).complete(prompt_ids)
        assert answer.last.handover.prefill_cached_tokens == 0, "pages of another adapter were reused"
        assert answer.token_ids == oracle.generate(prompt_ids, MAX_TOKENS), model

    def was_loaded() -> bool:
        # Other prompts evict its pages from both pools.
        for _ in range(12):
            OfModel(served, "").complete(random_ids(rng, 300))
        answer = OfModel(served, "rank-8").complete(prompt_ids)
        assert answer.token_ids == oracles["rank-8"].generate(prompt_ids, MAX_TOKENS)
        return answer.last.usage.host_tokens > 0

    wait_until(was_loaded, RESTART_S, "an adapter's pages come from the store")
    served.wait_clean()


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"prefill_tp": 2}])
def test_ranks_compute_parts_of_adapters(
    clusters: Clusters,
    tiny_config: ClusterConfig,
    paths: Mapping[str, Path],
    oracles: Mapping[str, Oracle],
    degrees: dict[str, int],
) -> None:
    served = clusters.get(with_adapters(config_for(tiny_config, **degrees), paths, max_loras=2))
    wait_whole(served)
    rng = random.Random(4)
    streams = [(model, OfModel(served, model).start(random_ids(rng, 40), max_tokens=MAX_TOKENS)) for model in oracles]
    for model, stream in streams:
        expected = oracles[model].generate(stream.prompt_ids, MAX_TOKENS)
        assert stream.finish().token_ids == expected, model
    served.wait_clean()


def test_cached_pages_in_fp8_belong_to_the_adapter(
    clusters: Clusters, tiny_config: ClusterConfig, paths: Mapping[str, Path]
) -> None:
    served = clusters.get(with_adapters(tiny_config, paths, kv_cache_dtype="fp8_e4m3"))
    prompt_ids = random_ids(random.Random(5), 100)
    outputs = set()
    for model in ("", *NAMES):
        first, second = (OfModel(served, model).complete(prompt_ids) for _ in range(2))
        assert (first.last.handover.prefill_cached_tokens, second.last.handover.prefill_cached_tokens) == (0, 96)
        assert first.token_ids == second.token_ids
        outputs.add(tuple(first.token_ids))
    assert len(outputs) == 1 + len(NAMES)
    served.wait_clean()

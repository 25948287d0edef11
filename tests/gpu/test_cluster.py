"""A prefill and a decode worker, on one GPU and on two, with pages over CUDA IPC or NCCL."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.kvcache.sizing import CONTEXT_BYTES
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tests.cluster.conftest import (
    RESTART_S,
    VOCAB_SIZE,
    Clusters,
    Oracle,
    ServedCluster,
    random_ids,
    save_tiny_model,
    wait_until,
)
from tests.cluster.faults import wait_whole
from tests.gpu.random_models import let_count_up

pytestmark = pytest.mark.timeout(300)
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
# Transport and workers per GPU.
PLACES = [
    pytest.param("auto", 2, id="one-gpu"),
    pytest.param("nvlink", 1, id="two-gpus-nvlink", marks=NEEDS_TWO),
    pytest.param("nccl", 1, id="two-gpus-nccl", marks=NEEDS_TWO),
]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


def pid_of(served: ServedCluster, worker_id: str) -> int:
    worker = served.worker(worker_id)
    return worker.pid if worker is not None else 0


@pytest.mark.parametrize(("transport", "workers_per_gpu"), PLACES)
def test_greedy_tokens_in_float32_equal_transformers(
    clusters: Clusters, cuda_config: ClusterConfig, transport: str, workers_per_gpu: int
) -> None:
    served = clusters.get(replace(cuda_config, dtype="float32", transport=transport, workers_per_gpu=workers_per_gpu))
    oracle = Oracle(Path(cuda_config.model))
    rng = random.Random(1)
    for num_tokens in (1, 2, 15, 16, 17, 48, 64, 100, 200, 400):
        prompt_ids = random_ids(rng, num_tokens)
        for _ in range(2):  # First computed, then found in the cache.
            answer = served.complete(prompt_ids, max_tokens=40, ignore_eos=True)
            assert answer.token_ids == oracle.generate(prompt_ids, 40, ignore_eos=True)
            assert answer.last.handover.attempts == 1
    (shipped,) = served.integrity()["prefill-0"].stats.shipped
    assert shipped.transport == ("nvlink" if transport == "auto" else transport) and shipped.num_pages > 0
    served.wait_clean()


@pytest.mark.parametrize("mode", ["both", "workers"])
def test_modes_on_one_gpu_equal_transformers(clusters: Clusters, cuda_config: ClusterConfig, mode: str) -> None:
    """Workers of `--workers` hand every request over, in both directions."""
    num_any, num_both, placement = (2, 0, "disaggregated") if mode == "workers" else (0, 2, cuda_config.placement)
    config = replace(cuda_config, num_prefill=0, num_decode=0, num_any=num_any, num_both=num_both, placement=placement)
    served = clusters.get(replace(config, dtype="float32", workers_per_gpu=2))
    oracle = Oracle(Path(cuda_config.model))
    rng = random.Random(3)
    prompts = [random_ids(rng, rng.randint(30, 400)) for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: served.complete(p, max_tokens=30, ignore_eos=True), prompts))
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert oracle.confirms(prompt_ids, answer.token_ids)
    shipped = [[(s.transport, s.num_pages > 0) for s in report.stats.shipped] for report in served.integrity().values()]
    assert shipped == [[("nvlink", True)] if mode == "workers" else []] * 2
    served.wait_clean()


@pytest.mark.parametrize(("transport", "workers_per_gpu"), PLACES[:2])
def test_bfloat16_answers_the_same_cold_and_warm(
    clusters: Clusters, cuda_config: ClusterConfig, transport: str, workers_per_gpu: int
) -> None:
    served = clusters.get(replace(cuda_config, transport=transport, workers_per_gpu=workers_per_gpu))
    rng = random.Random(2)
    for num_tokens in (17, 100, 400):
        prompt_ids = [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        answers = [served.complete(prompt_ids, max_tokens=20, ignore_eos=True) for _ in range(2)]
        assert [len(a.token_ids) for a in answers] == [20, 20]
    (shipped,) = served.integrity()["prefill-0"].stats.shipped
    assert shipped.transport == "nvlink" and shipped.num_pages > 0
    served.wait_clean()


def test_drafts_of_a_model_follow_its_pages(clusters: Clusters, cuda_config: ClusterConfig, tmp_path: Path) -> None:
    """The decode worker drafts behind pages that the prefill worker has computed."""
    model = tmp_path / "model"
    save_tiny_model(model, head_dim=64)
    let_count_up(model)
    config = replace(cuda_config, model=str(model), workers_per_gpu=2, speculation=f"draft:{model}")
    served = clusters.get(config)
    rng = random.Random(6)
    for num_tokens in (1, 16, 17, 100, 300):
        prompt_ids = random_ids(rng, num_tokens)
        answer = served.complete(prompt_ids, max_tokens=60, ignore_eos=True)
        assert answer.token_ids == [(prompt_ids[-1] + 1 + number) % VOCAB_SIZE for number in range(60)]
        assert answer.last.handover.attempts == 1
    reports = served.integrity()
    [drafted] = reports["decode-0"].stats.drafted
    assert drafted.num_tokens > 20 and drafted.num_accepted >= 0.95 * drafted.num_tokens
    (shipped,) = reports["prefill-0"].stats.shipped
    assert shipped.num_pages > 0
    served.wait_clean()


def test_shares_of_one_gpu_add_up_and_stay(clusters: Clusters, cuda_config: ClusterConfig) -> None:
    # Large pages: the tiny model's pools would otherwise have millions.
    config = replace(cuda_config, num_pages=0, page_size=1024, chunk_size=2048, workers_per_gpu=2)
    served = clusters.get(config)
    total = torch.cuda.mem_get_info()[1]
    layout = page_layout_of(ModelConfig.from_dir(Path(config.model)), config.page_size, "bfloat16", "auto")
    share = total // 2 - CONTEXT_BYTES
    for report in served.integrity().values():
        pool = report.stats.num_total_pages * layout.page_bytes
        assert 0.7 * share < pool < config.mem_fraction_static * share
    free = torch.cuda.mem_get_info()[0]
    rng = random.Random(4)
    prompts = [random_ids(rng, rng.randint(300, 480)) for _ in range(64)]
    with ThreadPoolExecutor(32) as pool_of_clients:
        list(pool_of_clients.map(lambda p: served.complete(p, max_tokens=30, ignore_eos=True), prompts))
    # Libraries load some kernels at first use.
    assert free - torch.cuda.mem_get_info()[0] < 128 * 2**20
    # A replacement finds the memory that it had.
    before = {name: report.stats.num_total_pages for name, report in served.integrity().items()}
    for name in before:
        pid = served.kill(name)
        wait_until(lambda name=name, pid=pid: pid_of(served, name) not in (0, pid), RESTART_S, f"{name} is replaced")
        wait_whole(served)
        num_pages = served.integrity()[name].stats.num_total_pages
        assert num_pages == pytest.approx(before[name], rel=0.03)
    served.wait_clean()

"""Tests that need an NVIDIA GPU; skipped without one."""

import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine import dry_run
from tests.cluster.conftest import save_tiny_model

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no NVIDIA GPU")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


def visible_gpu(number: int) -> str:
    """Return CUDA_VISIBLE_DEVICES of a process that is to see only GPU `number` of this process."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(number) if ours is None else ours.split(",")[number]


@pytest.fixture(autouse=True, scope="module")
def memory_given_back() -> Iterator[None]:
    """Free GPU memory held in reference cycles, for the next module and other processes."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def all_prefill_graphs() -> Iterator[None]:
    """On a busy GPU no prefill would seem bound by its launch, and none would have a graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "LAUNCH_BOUND", math.inf)
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with head_dim 64, which FlashInfer supports."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_model(directory, head_dim=64)
    return directory


@pytest.fixture(scope="session")
def cuda_config(model_dir: Path) -> ClusterConfig:
    return ClusterConfig(model=str(model_dir), device="cuda", num_pages=256, grpc_port=0, http_port=0)

"""Division of a GPU's memory."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine import dry_run
from tandem.engine.build import build_engine
from tandem.engine.config import MAX_PREFILL_BATCH_SIZE, EngineConfig
from tandem.engine.dry_run import free_bytes
from tandem.engine.kvcache.sizing import CONTEXT_BYTES
from tandem.engine.trial_batches import TrialBatches

# Leaves room for the test process's other allocations.
FRACTION = 0.6


def config_with(model_dir: Path, fraction: float = FRACTION, num_pages: int = 0, backend: str = "auto") -> EngineConfig:
    # Large pages: the tiny model's pool would otherwise have millions.
    return EngineConfig(
        str(model_dir),
        device="cuda",
        dtype="bfloat16",
        page_size=1024,
        num_pages=num_pages,
        attention_backend=backend,
        cuda_graph_max_bs=16,
        mem_fraction_static=fraction,
        max_chunk_tokens=2048,
    )


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_weights_graphs_and_pool_take_the_share(
    backend: str, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = free_bytes()
    total = torch.cuda.mem_get_info()[1]
    with caplog.at_level(logging.INFO, "tandem.engine.cuda_build"):
        engine = build_engine(config_with(model_dir, backend=backend), "memory", lambda doing: None)
    taken = before - free_bytes()
    assert taken == pytest.approx(FRACTION * total, rel=0.03)
    assert engine.pool.num_pages * engine.pool.layout.page_bytes == pytest.approx(FRACTION * total, rel=0.05)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    del engine
    assert before - free_bytes() < 2 * 2**30


def test_memory_of_other_processes_is_left_alone(model_dir: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    others = torch.empty(int(0.6 * total), dtype=torch.uint8, device="cuda")
    engine = build_engine(config_with(model_dir, fraction=0.9), "memory", lambda doing: None)
    assert 0.2 * total < engine.pool.num_pages * engine.pool.layout.page_bytes < 0.4 * total
    del others, engine
    free_bytes()


def test_an_impossible_share_is_refused(model_dir: Path) -> None:
    before = free_bytes()
    with pytest.raises(ValueError, match=r"there is room for 0 pages .*use a larger mem_fraction_static"):
        build_engine(config_with(model_dir, fraction=0.001), "memory", lambda doing: None)
    with pytest.raises(ValueError, match="a num_pages of at most"):
        build_engine(config_with(model_dir, num_pages=10**9), "memory", lambda doing: None)
    assert before - free_bytes() < 2 * 2**30


def test_a_share_of_the_gpu_holds_forward_passes_too(model_dir: Path) -> None:
    before, total = free_bytes(), torch.cuda.mem_get_info()[1]
    config = replace(config_with(model_dir, fraction=0.98), workers_per_gpu=2)
    engine = build_engine(config, "share", lambda doing: None)
    free, share = torch.cuda.mem_get_info()[0], total // 2 - CONTEXT_BYTES
    assert 0.9 * share < before - free <= share
    # The largest forward pass takes nothing more from the device.
    trials = TrialBatches(engine.model.config)
    batch = trials.prefill(config.max_chunk_tokens, 0, MAX_PREFILL_BATCH_SIZE, dry_run._SAMPLED)
    engine.forward(batch).logprobs()
    assert free - torch.cuda.mem_get_info()[0] < 32 * 2**20
    del engine, batch
    free_bytes()

"""Ranks that would compute in different ways refuse to start."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine import agreement
from tandem.engine.agreement import check_equal
from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.models.base import Model
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.weights.fingerprint import model_fingerprint
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

CPU = torch.device("cpu")
SIZES = ((1, 2, 4), (128,), ())


def refusals(run: Callable[[ThreadGroup, ThreadCollectives], object]) -> list[str]:
    def of_rank(group: ThreadGroup, collectives: ThreadCollectives) -> str:
        try:
            run(group, collectives)
        except ValueError as error:
            return str(error)
        return ""

    return run_ranks(2, of_rank)


def built(
    model_dir: str, group: ThreadGroup, collectives: ThreadCollectives
) -> tuple[Model, CpuKvPool, AttentionBackend]:
    config = ModelConfig.from_dir(Path(model_dir))
    layout = page_layout_of(config, 4, "float32", "auto").shard(group.ranks.rank, group.ranks.degree)
    pool = CpuKvPool(layout, 2, f"agreement-{group.ranks.rank}")
    model = build_model(config, torch.float32, CPU, collectives)
    return model, pool, ReferenceAttention(pool, config.num_q_heads // group.ranks.degree)


@pytest.mark.parametrize("sizes", [SIZES, ((1, 2, 4, 8), *SIZES[1:])])
def test_other_decode_graphs_are_refused(model_dir: str, sizes: object) -> None:
    found = refusals(lambda g, c: check_equal(g, *built(model_dir, g, c), SIZES if g.ranks.is_leader else sizes))
    expected = f"ranks disagree about the sizes of CUDA graphs: {SIZES} on rank 0, {sizes} on rank 1"
    assert found == [expected if sizes != SIZES else ""] * 2


def test_another_version_of_a_kernel_library_is_refused(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(group: ThreadGroup, collectives: ThreadCollectives) -> None:
        parts = built(model_dir, group, collectives)
        # Ranks are threads here: each sees its own installation for a while.
        versions.append(group.ranks.rank)
        check_equal(group, *parts)

    versions: list[int] = []
    monkeypatch.setattr(agreement, "_version", lambda package: f"{package} {versions.pop()}")
    found = refusals(of_rank)
    assert found[0] == found[1] and found[0].startswith("ranks disagree about the version of torch: ")


def test_a_library_that_is_not_there_counts_as_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert agreement._version("flashinfer-python") == "none"


def test_tensors_of_other_models_are_refused(model_dir: str) -> None:
    def fingerprint(group: ThreadGroup, collectives: ThreadCollectives) -> str:
        config = ModelConfig.from_dir(Path(model_dir))
        if not group.ranks.is_leader:
            config = replace(config, vocab_size=2 * config.vocab_size)
        return model_fingerprint(build_model(config, torch.float32, CPU, collectives), None, group)

    found = refusals(fingerprint)
    assert found[0] == found[1] and found[0].startswith("ranks disagree about the shapes of tensors (digests): ")

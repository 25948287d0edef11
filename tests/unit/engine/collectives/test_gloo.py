"""Ranks as threads, over gloo's own sockets."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tandem.engine.collectives.gloo import GlooCollectives
from tandem.engine.ranks.config import RankConfig

T = TypeVar("T")


def run(path: Path, degree: int, function: Callable[[GlooCollectives], T], timeout_s: float = 20.0) -> list[T]:
    connected = threading.Barrier(degree)

    def of_rank(rank: int) -> T:
        collectives = GlooCollectives(RankConfig(rank, degree), path / "store", timeout_s)
        # A rank that ended now would fail those that still connect.
        connected.wait(timeout_s)
        return function(collectives)

    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(of_rank, range(degree)))


def random(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_in_rank_order_with_the_same_bits_everywhere(tmp_path: Path, degree: int, dtype: torch.dtype) -> None:
    parts = [(random(rank, 5, 300) * 100).to(dtype) for rank in range(degree)]
    total = parts[0].float() if dtype is torch.bfloat16 else parts[0].clone()
    for part in parts[1:]:
        total += part
    for result in run(tmp_path, degree, lambda c: c.all_reduce(parts[c.ranks.rank].clone())):
        assert torch.equal(result, total.to(dtype))


def test_adds_the_residual_once(tmp_path: Path) -> None:
    residual = random(9, 3, 8)
    results = run(tmp_path, 2, lambda c: c.all_reduce_add(random(c.ranks.rank, 3, 8), residual.clone()))
    for result in results:
        assert torch.equal(result, residual + (random(0, 3, 8) + random(1, 3, 8)))


@pytest.mark.parametrize("num_columns", [64, 50, 17])
def test_gathers_uneven_columns_at_the_leader(tmp_path: Path, num_columns: int) -> None:
    whole = random(0, 3, num_columns)
    out = torch.empty_like(whole)

    def gather(collectives: GlooCollectives) -> torch.Tensor | None:
        held = collectives.ranks.vocabulary(num_columns)
        into = out if collectives.ranks.is_leader else None
        return collectives.gather_columns(whole[:, held.start : held.stop], num_columns, into)

    leader, *followers = run(tmp_path, 4, gather)
    assert leader is out and torch.equal(out, whole)
    assert followers == [None] * 3


def test_broadcasts_the_leaders_values(tmp_path: Path) -> None:
    def broadcast(collectives: GlooCollectives) -> torch.Tensor:
        ids = torch.full((4,), collectives.ranks.rank + 7)
        collectives.broadcast(ids)
        return ids

    assert all(ids.tolist() == [7] * 4 for ids in run(tmp_path, 2, broadcast))


def test_a_rank_that_stands_still_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    def reduce(collectives: GlooCollectives) -> str:
        if not collectives.ranks.is_leader:
            time.sleep(1.0)
            return ""
        with pytest.raises(RuntimeError, match="rank 0 lost another rank"):
            collectives.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match="rank 0 lost another rank") as error:
            collectives.check()
        return str(error.value)

    run(tmp_path, 2, reduce, timeout_s=0.5)


def test_refuses_operations_after_an_abort(tmp_path: Path) -> None:
    def aborted(collectives: GlooCollectives) -> None:
        collectives.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            collectives.broadcast(torch.ones(2))

    run(tmp_path, 2, aborted)


def test_an_abort_releases_a_waiting_operation(tmp_path: Path) -> None:
    def wait_or_stand_still(collectives: GlooCollectives) -> float:
        if not collectives.ranks.is_leader:
            time.sleep(1.5)
            return 0.0
        threading.Timer(0.2, collectives.abort).start()
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            collectives.all_reduce(torch.ones(2))
        return time.monotonic() - start

    waited, _ = run(tmp_path, 2, wait_or_stand_still)
    assert waited < 1.0

"""Operations between ranks that are processes: they share a GPU where there is only one."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch

from tandem.engine.collectives.base import Collectives
from tandem.engine.ranks.config import RankConfig
from tandem.engine.ranks.group import RankGroup
from tandem.worker.ranks.seat import Seat
from tests.gpu.rank_processes import connected, started, wait_for_the_end

DTYPES = (torch.float32, torch.bfloat16)
# Numbers, among them no whole vectors, sums of one and of two shots, and more than fit staging at once.
COUNTS = (1, 7, 64, 4096, 16 * 4096 + 3, 300_001, 8192 * 300, 4 * 2**20 + 12_345)
# Rows and columns: no whole vectors, ranks without columns, and more than fit staging at once.
MATRICES = ((1, 9), (3, 1003), (17, 4096), (2100, 8192))
LENGTHS = (1, 3, 256, 3_000_001)
NUM_REPLAYS = 200
RESIDUAL = 99
# Far above the times of kernels that take turns on a GPU, and below the limit of a wait.
PROMPTLY_S = 5.0


class Found(NamedTuple):
    what: str
    result: torch.Tensor


def numbers(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(count, generator=generator).to(dtype).cuda()


def sum_of(degree: int, count: int, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
    total = numbers(0, count, dtype).float()
    for rank in range(1, degree):
        total += numbers(rank, count, dtype).float()
    return (total if residual is None else total + residual.float()).to(dtype)


def operations(ranks: RankConfig, collectives: Collectives) -> Iterator[Found]:
    """Every operation with the results that all ranks have."""
    for dtype in DTYPES:
        for count in COUNTS:
            own = numbers(ranks.rank, count, dtype)
            yield Found(f"sum of {count} {dtype}", collectives.all_reduce(own.clone()))
            residual = numbers(RESIDUAL, count, dtype)
            yield Found(f"sum of {count} {dtype}, residual", collectives.all_reduce_add(own.clone(), residual.clone()))
    for length in LENGTHS:
        x = torch.arange(length, device="cuda") * (1 if ranks.is_leader else -1)
        collectives.broadcast(x)
        yield Found(f"broadcast of {length}", x)


def replayed(ranks: RankConfig, collectives: Collectives) -> Iterator[Found]:
    """A graph of operations, each of which depends on the one before, without the host in between."""
    x, y = numbers(ranks.rank, 16 * 64, torch.float32), numbers(RESIDUAL, 16 * 64, torch.float32)
    ids = torch.zeros(16, dtype=torch.int64, device="cuda")
    whole = torch.zeros(16, 64, device="cuda")

    def step() -> None:
        partial_sum = x / (1 + y.abs().sum())
        y.copy_(collectives.all_reduce_add(partial_sum, y.clone()))
        held = ranks.vocabulary(64)
        collectives.gather_columns(y.view(16, 64)[:, held.start : held.stop].contiguous(), 64, whole)
        ids.copy_(whole.argmax(-1))
        collectives.broadcast(ids)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(NUM_REPLAYS):
        graph.replay()
    yield Found("replayed sums", y)
    yield Found("replayed broadcasts", ids)


def gathered(ranks: RankConfig, collectives: Collectives) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yields a whole matrix, and what was gathered."""
    for dtype in DTYPES:
        for num_rows, num_columns in MATRICES:
            whole = numbers(RESIDUAL, num_rows * num_columns, dtype).view(num_rows, num_columns)
            held = ranks.vocabulary(num_columns)
            yield whole, collectives.gather_columns(whole[:, held.start : held.stop].contiguous(), num_columns)


def digests(found: Iterator[Found]) -> list[tuple[str, str]]:
    return [(what, hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()) for what, x in found]


def compute(seat: Seat) -> None:
    ranks, group = seat.order.ranks, seat.group
    with connected(group) as collectives:
        group.gathered(digests(operations(ranks, collectives)))
        for _ in gathered(ranks, collectives):
            pass
        group.gathered(digests(replayed(ranks, collectives)))
        wait_for_the_end(seat)


def connect_and_wait(seat: Seat) -> None:
    with connected(seat.group) as collectives:
        warm_up(seat.group, collectives)
        wait_for_the_end(seat)


def warm_up(group: RankGroup, collectives: Collectives) -> None:
    collectives.all_reduce(torch.ones(64, device="cuda"))
    torch.cuda.synchronize()
    group.gathered(None)


@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_get_the_same_bits_and_the_right_ones(degree: int) -> None:
    with started(degree, compute) as (processes, _), connected(processes.group) as collectives:
        group = processes.group
        found = list(operations(group.ranks, collectives))
        for other in group.gathered(digests(iter(found))):
            assert other == digests(iter(found))
        results = iter(found)
        for dtype in DTYPES:
            for count in COUNTS:
                assert torch.equal(next(results).result, sum_of(degree, count, dtype)), (count, dtype)
                residual = numbers(RESIDUAL, count, dtype)
                assert torch.equal(next(results).result, sum_of(degree, count, dtype, residual)), (count, dtype)
        for length in LENGTHS:
            assert torch.equal(next(results).result, torch.arange(length, device="cuda"))
        for whole, at_leader in gathered(group.ranks, collectives):
            assert at_leader is not None and torch.equal(at_leader, whole)
        of_ranks = group.gathered(digests(replayed(group.ranks, collectives)))
        assert all(other == of_ranks[0] for other in of_ranks)


@pytest.mark.parametrize("cause", ["abort", "death"])
def test_a_rank_that_waits_for_another_is_released(cause: str) -> None:
    with started(2, connect_and_wait) as (processes, deaths), connected(processes.group) as collectives:
        warm_up(processes.group, collectives)
        release = collectives.abort if cause == "abort" else partial(os.kill, processes.pids[1], signal.SIGKILL)
        # The follower never comes.
        collectives.all_reduce(torch.ones(64, device="cuda"))
        event = torch.cuda.Event()
        event.record()
        time.sleep(0.3)
        assert not event.query()
        began = time.monotonic()
        threading.Timer(0.2, release).start()
        event.synchronize()
        assert time.monotonic() - began < PROMPTLY_S
        with pytest.raises(RuntimeError, match="aborted"):
            collectives.check()
        if cause == "death":
            assert "SIGKILL" in deaths.get(timeout=PROMPTLY_S)

"""Ranks as processes, which share the test's GPU, or have one each where there are several."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from tandem.engine.collectives.base import Collectives
from tandem.engine.collectives.choice import open_collectives
from tandem.engine.config import EngineConfig
from tandem.engine.ranks.group import RankGroup
from tandem.worker.config import WorkerConfig
from tandem.worker.ranks.processes import RankProcesses
from tandem.worker.ranks.seat import Seat
from tandem.worker.ranks.serving import use_device
from tests.unit.worker.ranks.lives import POLL_S, NoRole

T = TypeVar("T")
STOP_TIMEOUT_S = 10.0


@contextmanager
def started(
    degree: int, run: Callable[[Seat], None], engine: EngineConfig | None = None
) -> Iterator[tuple[RankProcesses, "queue.Queue[str]"]]:
    """Yields the leader's side, and what is told of deaths. Args: run: a function of a module."""
    deaths: queue.Queue[str] = queue.Queue()
    worker = WorkerConfig("decode-0", "decode", engine or EngineConfig(model_dir="none", degree=degree), 64)
    ranks = RankProcesses(worker, NoRole(), "life", run, deaths.put)  # type: ignore[arg-type]
    try:
        yield ranks, deaths
    finally:
        began = time.monotonic()
        ranks.stop(STOP_TIMEOUT_S)
    assert time.monotonic() - began < STOP_TIMEOUT_S, "a rank had to be killed"


@contextmanager
def connected(group: RankGroup) -> Iterator[Collectives]:
    use_device("cuda", group.ranks)
    collectives = open_collectives(group, torch.device("cuda", torch.cuda.current_device()))
    assert collectives is not None
    yield collectives
    collectives.close()


def wait_for_the_end(seat: Seat) -> None:
    while not seat.memory.progress.is_stopping:
        time.sleep(POLL_S)

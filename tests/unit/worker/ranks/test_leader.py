"""A worker's followers from its own side, with real processes and a stand-in for the engine."""

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tandem import exit_codes
from tandem.engine.config import EngineConfig
from tandem.engine.ranks.group import RankGroup
from tandem.processes import ProcessId
from tandem.worker.config import WorkerConfig
from tandem.worker.ranks import leader, standstill
from tandem.worker.ranks.leader import Leader
from tandem.worker.ranks.seat import Seat
from tests.fakes.engine import FakeEngine
from tests.unit.worker.ranks.lives import NoRole, build_and_die, build_and_wait, refuse_at_once

TIMEOUT_S = 20.0


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[int]":
    """Returns the statuses with which the process would have ended."""
    statuses: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(leader.os, "_exit", statuses.put)
    return statuses


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Seat], None]], Leader]]:
    made: list[Leader] = []

    def build_engine(config: EngineConfig, name: str, on_progress: object, group: RankGroup, _: object) -> FakeEngine:
        group.check_equal("the number of pages", 8)
        return FakeEngine(8, 4)

    def start(run: Callable[[Seat], None]) -> Leader:
        monkeypatch.setattr(leader, "build_engine", build_engine)
        monkeypatch.setattr(leader, "serve_follower", run)
        role: Any = NoRole()
        one = Leader(WorkerConfig("decode-0", "decode", EngineConfig("m", degree=3), 16), role, "life")
        made.append(one)
        return one

    yield start
    for one in made:
        one.stop(TIMEOUT_S)


def test_followers_are_built_and_stopped_with_the_worker(
    started: Callable[[Callable[[Seat], None]], Leader], exits: "queue.Queue[int]"
) -> None:
    worker = started(build_and_wait)
    worker.build(lambda _: None, lambda: 5)
    assert [link.rank.pid for link in worker.followers] == list(worker.follower_pids) and worker.num_ranks == 3
    assert not worker.is_silent()
    processes = [ProcessId.of(pid) for pid in worker.follower_pids]
    worker.stop(TIMEOUT_S)
    assert not any(process.is_alive() for process in processes) and exits.empty()


def test_a_follower_that_cannot_start_says_why(
    started: Callable[[Callable[[Seat], None]], Leader], exits: "queue.Queue[int]"
) -> None:
    worker = started(refuse_at_once)
    with pytest.raises(ValueError, match=r"^rank 2: too little memory$"):
        worker.build(lambda _: None, lambda: 5)
    assert not worker.follower_pids and exits.empty()


def test_the_worker_ends_with_a_follower(
    started: Callable[[Callable[[Seat], None]], Leader], exits: "queue.Queue[int]"
) -> None:
    worker = started(build_and_die)
    worker.build(lambda _: None, lambda: 5)
    assert exits.get(timeout=TIMEOUT_S) == exit_codes.RANK_FAILED


def test_a_stopped_follower_makes_the_worker_silent_and_holds_its_steps(
    started: Callable[[Callable[[Seat], None]], Leader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standstill, "SILENCE_S", 0.3)
    worker = started(build_and_wait)
    num_steps = 5
    worker.build(lambda _: None, lambda: num_steps)
    stopped = worker.follower_pids[1]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(worker.is_silent)
    worker.num_steps(0)
    num_steps = 8
    assert worker.num_steps(0) == 5
    os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: not worker.is_silent())
    wait_until(lambda: worker.num_steps(0) == 8)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

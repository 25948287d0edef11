"""Followers as real processes, with a stand-in for the engine."""

import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem import __version__
from tandem.engine.config import EngineConfig
from tandem.engine.ranks.ring import NUM_SLOTS
from tandem.processes import ProcessId
from tandem.worker.config import WorkerConfig
from tandem.worker.ranks.memory import RankMemory
from tandem.worker.ranks.processes import RankProcesses
from tandem.worker.ranks.seat import Seat
from tandem.worker.ranks.standstill import SILENCE_S, GroupPulse, GroupSteps
from tests.unit.worker.ranks.lives import NoRole, agree_and_echo, never_end, refuse

TIMEOUT_S = 20.0
LEADER = """
import sys, time
from tests.unit.worker.ranks.lives import never_end
from tests.unit.worker.ranks.test_processes import started
with started(3, never_end) as (ranks, _):
    ranks.group.gathered(None)
    print(*ranks.pids[1:], flush=True)
    time.sleep(60)
"""


def worker(degree: int, **settings: Any) -> WorkerConfig:
    engine = EngineConfig(model_dir="none", degree=degree)
    return WorkerConfig("decode-0", "decode", engine, 64, api_keys=("a client's",), **settings)


@contextmanager
def started(
    degree: int, run: Callable[[Seat], None], **settings: Any
) -> Iterator[tuple[RankProcesses, "queue.Queue[str]"]]:
    deaths: queue.Queue[str] = queue.Queue()
    ranks = RankProcesses(worker(degree, **settings), NoRole(), "life", run, deaths.put)  # type: ignore[arg-type]
    try:
        yield ranks, deaths
    finally:
        ranks.stop(TIMEOUT_S if run is agree_and_echo else 0.0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_followers_agree_answer_and_stop() -> None:
    with started(3, agree_and_echo) as (ranks, deaths):
        values = ranks.group.gathered(("rank", 0, os.getpid()))
        assert [value[:2] for value in values] == [("rank", 0), ("rank", 1), ("rank", 2)]
        assert tuple(value[2] for value in values) == ranks.pids
        messages = [bytes([i]) * 5000 for i in range(40)]
        for rank, channel in enumerate(ranks.channels, 1):
            for message in messages:
                channel.send(message)
            answers: list[bytes] = []
            while len(answers) < len(messages):
                assert channel.wait(TIMEOUT_S)
                answers += channel.receive()
            assert answers == [bytes([rank]) + message for message in messages]
        processes = [ProcessId.of(pid) for pid in ranks.pids[1:]]
    assert not any(process.is_alive() for process in processes)
    assert deaths.empty()


def test_refusal_of_a_follower_is_the_workers() -> None:
    with started(3, refuse) as (ranks, _):
        ranks.group.gathered(None)
        with pytest.raises(ValueError, match=r"^rank 1: the model has 3 heads$"):
            ranks.group.gathered(None)


def test_follower_of_another_version_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could misread each forward pass: only both versions know their formats."""
    monkeypatch.setattr("tandem.worker.ranks.processes.__version__", "0.0.1")
    with started(2, agree_and_echo) as (ranks, deaths):
        mixed = rf"^rank 1: it is of tandem {re.escape(__version__)}, but its leader of 0\.0\.1: another version was"
        with pytest.raises(RuntimeError, match=mixed):
            ranks.group.gathered(None)
        assert deaths.get(timeout=TIMEOUT_S) == "rank 1 ended with status 76"


def test_a_dead_follower_is_reported_and_aborts_what_waits() -> None:
    with started(3, never_end) as (ranks, deaths):
        ranks.group.gathered(None)
        os.kill(ranks.pids[2], signal.SIGKILL)
        assert deaths.get(timeout=TIMEOUT_S) == "rank 2 was ended by SIGKILL"
        assert ranks.memory.progress.is_aborted
        with pytest.raises(ConnectionError):
            ranks.channels[1].receive()


def test_a_follower_that_takes_no_record_fails_the_leader_after_the_workers_stall_limit() -> None:
    with started(2, never_end, stall_timeout_s=0.1) as (ranks, _):
        ranks.group.gathered(None)
        assert ranks.group.wait_timeout_s == pytest.approx(0.15)
        with pytest.raises(TimeoutError, match=r"^rank 1 has taken no message for 0\.15 s$"):
            for _ in range(NUM_SLOTS + 1):
                ranks.memory.ring.write(b"a record")


def test_a_stopped_follower_holds_the_workers_steps() -> None:
    num_steps = 0
    with started(2, agree_and_echo) as (ranks, _):
        ranks.group.gathered(None)
        steps = GroupSteps(lambda: num_steps, ranks.memory.progress.beats)
        num_steps = 7
        wait_until(lambda: steps.count() == 7)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        wait_until(lambda: is_stopped_process(ranks.pids[1]))
        steps.count()
        num_steps = 9
        time.sleep(0.1)
        assert steps.count() == 7
        os.kill(ranks.pids[1], signal.SIGCONT)
        wait_until(lambda: steps.count() == 9)


def test_one_of_several_followers_holds_the_workers_steps() -> None:
    beats = [0, 0]
    steps = GroupSteps(lambda: 7 + sum(beats), lambda: list(beats))
    for number in range(1, 4):
        beats[0] = number
        assert steps.count() == 7
    beats[1] = 1
    assert steps.count() == 11


@pytest.mark.parametrize(
    ("signum", "text"), [(9, "rank 1 was ended by SIGKILL"), (35, "rank 1 was ended by signal 35")]
)
def test_the_death_of_a_follower_is_told_whatever_the_signal(signum: int, text: str) -> None:
    with started(2, never_end) as (ranks, deaths):
        ranks.group.gathered(None)
        os.kill(ranks.pids[1], signum)
        assert deaths.get(timeout=TIMEOUT_S) == text


def test_ranks_are_refused_where_stores_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(ValueError, match=r"^ranks rely on x86-64, .* but this is aarch64: use `tp` 1$"):
        RankMemory.create(2, 1.0)


def test_a_follower_that_does_not_run_makes_the_worker_silent() -> None:
    now, pulses = 0.0, [0, 0]
    group = GroupPulse(lambda: list(pulses), lambda: now)
    for number in range(1, 20):
        now, pulses = number * 0.25, [number, min(number, 4)]
        assert group.is_silent() == (now > 1.0 + SILENCE_S)
    pulses = [99, 99]
    assert not group.is_silent()


def is_stopped_process(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_followers_end_with_their_leader(is_stopped: bool) -> None:
    """Even one that stands still."""
    with subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        followers = [ProcessId.of(int(pid)) for pid in leader.stdout.readline().split()]
        assert len(followers) == 2
        if is_stopped:
            os.kill(followers[0].pid, signal.SIGSTOP)
        leader.kill()
    wait_until(lambda: not any(follower.is_alive() for follower in followers))

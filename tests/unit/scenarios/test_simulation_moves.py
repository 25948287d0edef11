"""Streams that move in a simulated cluster, with deaths, aborts, delays and lost routers, and injected bugs.

See test_simulation.py and test_simulation_finds.py.
"""

import os
import random
from typing import Any

import pytest

from tandem.both_worker.moves import StreamMoves
from tandem.decode_worker.leases import LeaseBook
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.router.attempts import Attempts
from tandem.worker.kept_pages import KeptPages
from tests.fakes.simulation.schedule import run_schedule

NUM_SCHEDULES = int(os.environ.get("TANDEM_SCHEDULES", "12"))
# Of each worker, by schedule.
NUM_RANKS = (1, 2, 1, 3)
MAX_SCHEDULES = 300


def run(number: int, asynchronous: bool, *, speculates: bool = False) -> int:
    """Run a random schedule; return the number of streams given back to move."""
    data = random.Random(number).randbytes(350)
    num_ranks = NUM_RANKS[number // 2 % 4]
    return run_schedule(data, asynchronous, True, num_ranks, moves=True, speculates=speculates).num_moves


def find_violation(first: int = 0, asynchronous: bool = False) -> str:
    """Run random schedules until one fails; return its message."""
    for number in range(first, first + MAX_SCHEDULES):
        try:
            run(number, asynchronous)
        except (AssertionError, RuntimeError, ValueError, KeyError) as error:
            return str(error) or repr(error)
    return ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "overlap"])
def test_moves_on_random_schedules_keep_all_guarantees(asynchronous: bool) -> None:
    numbers = range(3, 3 + NUM_SCHEDULES // 2)
    assert sum(run(number, asynchronous, speculates=number % 2 == 1) for number in numbers) > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "overlap"])
def test_moves_on_new_random_schedules_keep_all_guarantees(asynchronous: bool) -> None:
    first = random.getrandbits(60)
    numbers = range(first, first + NUM_SCHEDULES * 20)
    assert sum(run(number, asynchronous, speculates=number % 2 == 1) for number in numbers) > 0


def test_stream_that_goes_on_after_its_give_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two owners: the old worker would decode beside the new one."""
    original = DecodeScheduler.give_back_moved

    def give_back(self: DecodeScheduler, job: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(DecodeScheduler, "_end_job", lambda self, job: None)
            original(self, job)

    monkeypatch.setattr(DecodeScheduler, "give_back_moved", give_back)
    assert "given back" in find_violation(first=6)


def test_pages_that_are_kept_for_ever_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptPages, "let_go_overdue", lambda self: None)
    assert "no progress" in find_violation()


@pytest.mark.slow
def test_pages_freed_twice_after_a_move_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt takes the kept pages over, but their keeper frees them too."""
    original = KeptPages.let_go

    def let_go(self: KeptPages, request_id: str) -> bool:
        kept = self._kept.get(request_id)
        was_kept = original(self, request_id)
        if kept is not None:
            self._kept[request_id] = kept
        return was_kept

    monkeypatch.setattr(KeptPages, "let_go", let_go)
    assert find_violation()


@pytest.mark.slow
def test_pages_that_enter_the_tree_before_they_have_arrived_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LeaseBook._answer_copy

    def answer(self: LeaseBook, lease: Any) -> None:
        original(self, lease)
        if lease.lease_id in self._granted:
            del self._granted[lease.lease_id]
            self._cache.commit_lease(lease.handle)
            self._keep(lease)

    monkeypatch.setattr(LeaseBook, "_answer_copy", answer)
    assert find_violation()


def test_pages_of_a_copy_freed_while_they_are_read_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends during the copy, and its pages get another prompt."""
    original = StreamMoves._begin

    def begin(self: StreamMoves, move: Any) -> str:
        refusal = original(self, move)
        if not refusal:
            going = self._going[move.request_id, move.attempt]
            self._cache.release_pages(going.handle)
        return refusal

    monkeypatch.setattr(StreamMoves, "_begin", begin)
    assert find_violation()


@pytest.mark.slow
def test_next_attempt_before_the_give_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that takes any end of a move for a give-back restarts streams that still run."""
    original = Attempts.on_message

    def on_message(self: Attempts, request: Any, message: Any) -> None:
        if type(message).__name__ == "NotMoved":
            request.tracker.attempt += 1
        original(self, request, message)

    monkeypatch.setattr(Attempts, "on_message", on_message)
    assert find_violation()

"""Whatever dies, is delayed, cut off, stopped or cancelled, whenever: no page is lost or written by a stranger, every
client gets the right tokens, each once, and everything comes to rest.

A schedule is a tape of bytes: each decides what happens next among all that can. When the tape ends, faults end, and
what is left must finish.
"""

import os
import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from decode_worker.job import DecodeJob
from decode_worker.lease_records import WaitingLease
from decode_worker.scheduler import DecodeScheduler
from decode_worker.waiting_leases import WaitingLeases
from engine.kvcache.cache_manager import CacheManager, PageHandle
from kvtransfer.sender_link import SenderLease, SenderLink
from prefill_worker.job import PrefillJob
from prefill_worker.policies.table import PREFILL_POLICIES
from prefill_worker.queued_request import QueuedRequest
from prefill_worker.scheduler import PrefillScheduler
from router.policies.table import ROUTING_POLICIES
from tandem.messages import Admit
from tests.fakes.simulation import PAGE_SIZE, Simulation, SimWorker

# Half of them plain, half with overlapping forwards.
NUM_SCHEDULES = int(os.environ.get("TANDEM_SCHEDULES", "6000"))
NUM_PARTS = 8
MAX_TOTAL_TOKENS = 14


class Tape:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def ended(self) -> bool:
        return self._position >= len(self._data)

    def draw(self, limit: int) -> int:
        """A number from 0 to limit - 1; 0 once the tape has ended."""
        if self.ended:
            return 0
        value = self._data[self._position]
        self._position += 1
        return value % limit


def run_schedule(data: bytes, asynchronous: bool = False) -> Simulation:
    """Args: asynchronous: forwards overlap."""
    tape = Tape(data)
    simulation = Simulation(
        num_prefill=(2, 1, 2, 3)[tape.draw(4)],
        num_decode=(2, 1, 2, 3)[tape.draw(4)],
        # The largest request just fits, with the page of the first decode step.
        num_pages=8 + tape.draw(3),
        prefill_policy=PREFILL_POLICIES.names[tape.draw(len(PREFILL_POLICIES.names))],
        routing=ROUTING_POLICIES.names[tape.draw(len(ROUTING_POLICIES.names))],
        two_sided=bool(tape.draw(2)),
        asynchronous=asynchronous,
        # Composed at once, while the step before has not run; or mostly when it has, and sometimes before.
        step_s=(0.0, 1.0)[tape.draw(2)],
        # Who shares a prefix waits for it; or computes the same pages side by side.
        min_shared_tokens=(PAGE_SIZE, MAX_TOTAL_TOKENS)[tape.draw(2)],
        # A decode worker may have no place in its line either.
        max_waiting=(1024, 2, 1)[tape.draw(3)],
    )
    while not tape.ended:
        happen(simulation, tape)
        simulation.read_clients()
    simulation.drain()
    simulation.check_end()
    return simulation


def happen(simulation: Simulation, tape: Tape) -> None:
    """One event. Most are progress; a few are new requests; fewer still are faults."""
    kind = tape.draw(32)
    workers = list(simulation.workers.values())
    if kind < 24:
        actions = simulation.progress_actions()
        if actions:
            actions[tape.draw(len(actions))]()
    elif kind < 28:
        # Few distinct tokens and lengths, so that prefixes are shared often.
        length = 1 + tape.draw(9)
        prompt_ids = [tape.draw(2)] * (length // 2) + [1] * (length - length // 2)
        max_tokens = 1 + tape.draw(MAX_TOTAL_TOKENS - length)
        simulation.submit(prompt_ids, max_tokens, priority=tape.draw(2), stop_after=tape.draw(MAX_TOTAL_TOKENS))
    elif kind == 28:
        waiting = [c for c in simulation.clients if not c.ended]
        if waiting:
            simulation.cancel(waiting[tape.draw(len(waiting))])
    elif kind == 29:
        simulation.advance((0.4, 1.5, 25.0)[tape.draw(3)])
    elif kind == 30:
        for worker in list(simulation.dead):
            simulation.revive(worker)
        for worker in workers:
            worker.paused = False
    elif workers:
        worker = workers[tape.draw(len(workers))]
        fault(simulation, worker, tape)


def fault(simulation: Simulation, worker: SimWorker, tape: Tape) -> None:
    faults: list[Callable[[], object]] = [
        lambda: simulation.kill(worker),
        lambda: setattr(worker, "paused", not worker.paused),
        lambda: simulation.cut_control(worker),
        lambda: [link.cut() for link in simulation.links.values() if worker in (link.sender, link.receiver)],
    ]
    faults[tape.draw(len(faults))]()


def explore(number: int, num_schedules: int, asynchronous: bool) -> None:
    """Runs schedules that hypothesis makes up, the same ones for the same number; a failing one is cut down to its
    essence."""

    @seed(number)
    @settings(max_examples=num_schedules, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.binary(min_size=150, max_size=500))
    def any_schedule_keeps_every_promise(data: bytes) -> None:
        run_schedule(data, asynchronous)

    any_schedule_keeps_every_promise()


# In parts, so that they run side by side.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_any_schedule_keeps_every_promise(part: int, asynchronous: bool) -> None:
    explore(part, NUM_SCHEDULES // 2 // NUM_PARTS, asynchronous)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_many_schedules_never_run_before(part: int, asynchronous: bool) -> None:
    """The long mode; TANDEM_SCHEDULES says how many."""
    explore(random.getrandbits(64), max(NUM_SCHEDULES * 4, 40_000) // 2 // NUM_PARTS, asynchronous)


def find_violation(num_schedules: int = 3000, asynchronous: bool = False) -> str:
    """Runs random schedules until one breaks a promise; returns what it said."""
    for number in range(num_schedules):
        try:
            run_schedule(random.Random(number).randbytes(400), asynchronous)
        except (AssertionError, RuntimeError) as error:
            return str(error)
    return ""


def test_a_page_freed_one_step_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug that deferred freeing is there for: pages go back while copies launched with their numbers still run."""
    original = CacheManager.release_pages
    monkeypatch.setattr(CacheManager, "release_pages", lambda self, handle, after=(): original(self, handle))
    assert find_violation()


def test_a_dropped_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: SenderLink, lease: SenderLease, *, reported: bool = True) -> None:
        self._leases.pop(lease.lease_id, None)

    monkeypatch.setattr(SenderLink, "release_lease", release)
    assert "no progress" in find_violation()


def test_a_commit_before_its_copies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SenderLink._settle_if_copied

    def settle(self: SenderLink, lease: SenderLease) -> None:
        lease.copies = []
        original(self, lease)

    monkeypatch.setattr(SenderLink, "_settle_if_copied", settle)
    assert find_violation()


def test_pages_freed_while_a_step_in_flight_has_them_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DecodeScheduler._end_job

    def end(self: DecodeScheduler, job: DecodeJob) -> None:
        in_flight, self._in_flight = self._in_flight, None
        original(self, job)
        self._in_flight = in_flight

    monkeypatch.setattr(DecodeScheduler, "_end_job", end)
    assert "in flight" in find_violation(asynchronous=True)


def test_pages_freed_while_a_prefill_in_flight_has_them_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrefillScheduler._free_job

    def forget(self: PrefillScheduler, job: PrefillJob) -> None:
        launched, self._launched = self._launched, deque()
        original(self, job)
        self._launched = launched

    monkeypatch.setattr(PrefillScheduler, "_free_job", forget)
    assert "in flight" in find_violation(asynchronous=True)


def test_pages_shipped_while_a_prefill_in_flight_writes_them_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a request finds in the tree are not computed yet, though they are no work of its own."""
    original = PrefillScheduler._start

    def start(self: PrefillScheduler, queued: QueuedRequest, handle: PageHandle) -> int:
        num_tokens = original(self, queued, handle)
        self._computing[-1].computed_len = handle.cached_len
        return num_tokens

    monkeypatch.setattr(PrefillScheduler, "_start", start)
    assert "before they are computed" in find_violation(asynchronous=True)


def test_duplicates_freed_while_a_prefill_in_flight_writes_them_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CacheManager.cache_pages
    monkeypatch.setattr(CacheManager, "cache_pages", lambda self, *args, after=(): original(self, *args))
    assert "in flight" in find_violation(asynchronous=True)


def test_an_overtake_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they counted for each attempt afresh, who is started again and again would wait for ever."""
    original = WaitingLeases.line_up

    def line_up(self: WaitingLeases, waiting: WaitingLease, admit: Admit) -> WaitingLease | None:
        last = original(self, waiting, admit)
        waiting.num_overtaken = 0
        return last

    monkeypatch.setattr(WaitingLeases, "line_up", line_up)
    assert "overtaken" in find_violation()

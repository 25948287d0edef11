"""Changes of the cluster's size, turn by turn, with scripted processes and a scripted planner."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from tandem.deploy.config.bounds import Bounds, SizedKind
from tandem.deploy.supervise.change import Change, ChangeError, ChangeJob
from tandem.deploy.supervise.size_planner import SizePlanner, SizeReport
from tandem.deploy.supervise.sizing import (
    LATER_RETRY_S,
    PLAN_INTERVAL_S,
    REPLACED,
    RETRY_S,
    ROOM_INTERVAL_S,
    Sizing,
    name_of,
)
from tandem.router.worker_wait import UNKNOWN_START_S
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.sizes import ClusterSize
from tests.fakes.clock import FakeClock

ONE_TO_FOUR = Bounds(1, 4)


class Planner(SizePlanner):
    """Attributes: want: its targets."""

    def __init__(self) -> None:
        super().__init__({}, Objectives(), FakeClock())
        self.want: dict[str, int] = {}
        self.reports: list[SizeReport] = []

    def plan(self, report: SizeReport) -> Mapping[str, int]:
        self.reports.append(report)
        self.reasons = dict.fromkeys(self.want, "load")
        return self.want


class Fake:
    """A cluster of one worker.

    Attributes:
        loading: workers that were asked for, and how their start ends; "": it has not.
        draining: workers with requests.
        room: number of further workers that fit.
    """

    def __init__(self, bounds: Bounds = ONE_TO_FOUR, num_ready: int = 1, kind: SizedKind = "any") -> None:
        self.bounds: dict[SizedKind, Bounds] = {kind: bounds}
        self.start_s: dict[SizedKind, float] = {}
        self.kind = kind
        self.joined = [name_of(kind, number) for number in range(num_ready)]
        self.loading: dict[str, str] = {}
        self.draining: list[str] = []
        self.room = 99
        self.has_spare_routers = False
        self.evacuated: set[str] = set()
        self.clock, self.planner = FakeClock(), Planner()
        self.sizing = Sizing(self, self.planner, self.clock)

    # --- Sized ---

    def names(self, kind: SizedKind) -> list[str]:
        return sorted([*self.joined, *self.loading]) if kind == self.kind else []

    def has_joined(self, name: str) -> bool:
        return name in self.joined

    def is_evacuated(self, name: str) -> bool:
        return name in self.evacuated

    def join(self, kind: SizedKind, names: Sequence[str], begun: Sequence[SizedKind]) -> dict[str, Change]:
        if len(names) > self.room:
            raise ValueError("no room for more workers")
        self.room -= len(names)
        return {name: self._change(self._join(name)) for name in names}

    def leave(self, name: str, on_drained: Callable[[], None]) -> Change:
        self.draining.append(name)
        return self._change(self._leave(name, on_drained))

    def end(self, name: str) -> Change:
        return self._change(self._end(name))

    def keep(self, name: str) -> None:
        self.draining.remove(name)

    def _change(self, steps: Iterator[None]) -> Change:
        return Change(ChangeJob(), steps)

    def _join(self, name: str) -> Iterator[None]:
        self.loading[name] = ""
        while not (end := self.loading[name]):
            yield
        del self.loading[name]
        if end != "ready":
            self.room += 1
            raise ChangeError(f"{name}: {end}")
        self.joined.append(name)

    def _leave(self, name: str, on_drained: Callable[[], None]) -> Iterator[None]:
        while name in self.draining:
            yield
        on_drained()
        yield
        self.joined.remove(name)

    def _end(self, name: str) -> Iterator[None]:
        self.loading.pop(name, None)
        yield

    # --- the test ---

    def turn(self, want: int | None = None, seconds: float = PLAN_INTERVAL_S) -> None:
        if want is not None:
            self.planner.want = {self.kind: want}
        self.clock.advance(seconds)
        self.sizing.take_turn({}, ())

    def size(self) -> ClusterSize:
        size = self.sizing.size()
        assert size is not None
        return size

    def counts(self) -> tuple[int, int, int]:
        size = self.size().kinds[self.kind]
        return size.ready, size.starting, size.leaving


def test_workers_are_started_to_the_target_and_their_start_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    assert fake.size().kinds["any"].start_s == UNKNOWN_START_S
    fake.turn(3)
    assert fake.counts() == (1, 2, 0) and list(fake.loading) == ["worker-1", "worker-2"]
    fake.turn(4)
    assert fake.counts() == (1, 3, 0), "starts go on side by side"
    fake.loading["worker-2"] = "ready"
    fake.turn(seconds=20.0)
    assert fake.counts() == (2, 2, 0) and fake.start_s["any"] == pytest.approx(20.5)
    assert "workers: 1 -> 3 (load), starting worker-1, worker-2" in caplog.messages
    assert fake.size().num_changes == {("any", "up", "load"): 3}


def test_the_target_is_kept_within_the_bounds() -> None:
    fake = Fake(Bounds(1, 2))
    fake.turn(9)
    assert fake.counts() == (1, 1, 0) and fake.size().kinds["any"].target == 2
    fake.turn(0)
    assert fake.counts() == (1, 0, 0) and not fake.draining, "a worker that still starts ends at once"


def test_the_highest_numbers_drain_and_are_taken_back_if_the_load_returns(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(num_ready=3)
    fake.turn(1)
    assert fake.counts() == (1, 0, 2) and fake.draining == ["worker-2", "worker-1"]
    fake.turn(2)
    assert fake.counts() == (2, 0, 1) and fake.draining in (["worker-1"], ["worker-2"]) and not fake.loading
    assert any("stays" in message for message in caplog.messages)
    fake.draining.clear()
    fake.turn()
    fake.turn(4)
    assert fake.counts() == (2, 1 + 1, 0), "a worker that ends is not taken back"


def test_a_draining_router_is_not_taken_back() -> None:
    fake = Fake(Bounds(1, 2), num_ready=2, kind="router")
    fake.turn(1)
    assert fake.draining == ["router-1"]
    fake.turn(2)
    assert fake.draining == ["router-1"] and not fake.loading, "its name is taken until it has ended"
    fake.draining.clear()
    fake.turn()
    fake.turn()
    assert list(fake.loading) == ["router-1"]


def test_a_process_that_is_restarted_by_hand_does_not_leave() -> None:
    fake = Fake(num_ready=2)
    fake.planner.want = {"any": 1}
    fake.clock.advance(1.0)
    fake.sizing.take_turn({}, ("worker-1",))
    assert fake.draining == ["worker-0"]
    fake.planner.want = {"any": 3}
    fake.clock.advance(1.0)
    fake.sizing.take_turn({}, None)
    assert not fake.loading, "a change by hand comes first"


def test_without_room_the_target_is_cut_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    fake.room = 1
    fake.turn(4)
    assert list(fake.loading) == ["worker-1"] and fake.size().kinds["any"].no_room == "no room for more workers"
    for _ in range(50):
        fake.turn()
    assert caplog.messages.count("no more workers: no room for more workers") == 1 and len(fake.loading) == 1
    fake.room = 9
    fake.turn(seconds=ROOM_INTERVAL_S)
    assert len(fake.loading) == 3 and not fake.size().kinds["any"].no_room


def test_failed_starts_are_repeated_later_and_fail_waiting_requests(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(Bounds(0, 2), num_ready=0)
    fake.turn(1)
    fake.loading["worker-0"] = "no memory"
    fake.turn()
    assert fake.counts() == (0, 0, 0) and not fake.size().failure, "one failure may be chance"
    fake.turn()
    assert not fake.loading
    fake.turn(seconds=RETRY_S)
    fake.loading["worker-0"] = "no memory"
    fake.turn()
    assert fake.size().failure == "workers cannot be started: worker-0: no memory"
    fake.turn(seconds=LATER_RETRY_S / 2)
    assert not fake.loading
    fake.turn(seconds=LATER_RETRY_S)
    assert not fake.size().failure, "requests may wait for the next try"
    fake.loading["worker-0"] = "ready"
    fake.turn()
    assert fake.counts() == (1, 0, 0) and sum("cannot be started" in message for message in caplog.messages) == 2


def test_a_dead_worker_counts_as_starting_and_kinds_of_a_fixed_number_are_reported() -> None:
    fake = Fake(num_ready=2)
    fake.turn(2)
    report = fake.planner.reports[-1]
    assert (report.ready["any"], report.starting["any"]) == (2, 0)
    fake.joined.remove("worker-1")
    fake.loading["worker-1"] = ""
    fake.turn(2)
    report = fake.planner.reports[-1]
    assert (report.ready["any"], report.starting["any"]) == (1, 1) and fake.counts() == (1, 1, 0)


def test_nothing_follows_the_load_without_bounds() -> None:
    fake = Fake()
    fake.bounds.clear()
    fake.turn(4)
    assert fake.sizing.size() is None and not fake.loading and not fake.planner.reports


class WaitingFake(Fake):
    """Starts wait for a node that Ray adds."""

    def join(self, kind: SizedKind, names: Sequence[str], begun: Sequence[SizedKind]) -> dict[str, Change]:
        return {name: Waiting(self, name) for name in names}


class Waiting(Change):
    def __init__(self, fake: Fake, name: str) -> None:
        super().__init__(ChangeJob(), self._run(fake, name))

    def _run(self, fake: Fake, name: str) -> Iterator[None]:
        fake.loading[name] = ""
        try:
            while True:
                self.wait(lambda: False)
                yield
        finally:
            del fake.loading[name]


def test_starts_that_wait_for_a_node_are_given_up_when_not_needed() -> None:
    fake = WaitingFake()
    fake.turn(3)
    assert sorted(fake.loading) == ["worker-1", "worker-2"] and not fake.sizing.is_changing
    fake.turn(2)
    assert sorted(fake.loading) == ["worker-1"] and not fake.sizing.changes("worker-2")
    # A change by hand.
    fake.sizing.withdraw()
    assert not fake.loading and not fake.sizing.changes("worker-1")


def test_workers_whose_node_goes_count_as_leaving() -> None:
    """Their replacements are no surplus."""
    fake = Fake(num_ready=2)
    fake.evacuated.add("worker-0")
    fake.loading["worker-2"] = ""
    fake.turn(2)
    report = fake.planner.reports[-1]
    assert (report.ready["any"], report.starting["any"], report.leaving["any"]) == (1, 1, 1)
    assert not fake.sizing.is_changing and not fake.draining


def test_a_start_that_is_not_needed_takes_back_its_room_at_once() -> None:
    """A start and its steps refer to each other, so a dropped one would end at some collection of garbage."""
    reserved: list[str] = []

    class Start(Change):
        def __init__(self, name: str) -> None:
            super().__init__(ChangeJob(), self._run(name))

        def _run(self, name: str) -> Iterator[None]:
            reserved.append(name)
            try:
                while True:
                    yield
            finally:
                reserved.remove(name)

    class Reserving(Fake):
        def names(self, kind: SizedKind) -> list[str]:
            return sorted([*self.joined, *reserved]) if kind == self.kind else []

        def join(self, kind: SizedKind, names: Sequence[str], begun: Sequence[SizedKind]) -> dict[str, Change]:
            return {name: Start(name) for name in names}

    f = Reserving()
    f.turn(2)
    assert reserved == ["worker-1"]
    f.turn(1)
    assert not reserved


def test_missing_workers_of_a_fixed_number_are_started_when_there_is_room() -> None:
    fake = Fake(Bounds(2, 2), num_ready=1)
    fake.room = 0
    fake.turn()
    assert fake.size().kinds["any"].no_room == "no room for more workers" and fake.counts() == (1, 0, 0)
    fake.room = 1
    fake.turn(seconds=ROOM_INTERVAL_S)
    size = fake.size()
    assert fake.counts() == (1, 1, 0) and (size.kinds["any"].reason, size.kinds["any"].no_room) == (REPLACED, "")
    assert size.num_changes == {("any", "up", REPLACED): 1}


def test_routers_that_are_not_to_run_are_told_although_no_number_follows_the_load() -> None:
    fake = Fake(kind="router")
    fake.bounds = {}
    assert fake.sizing.size() is None
    fake.has_spare_routers = True
    assert fake.size() == ClusterSize(routers=("router-0",))

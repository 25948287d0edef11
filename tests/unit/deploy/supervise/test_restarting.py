"""Restarts of one process, turn by turn, with fake processes."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from tandem.deploy.supervise import router_changes, scaling
from tandem.deploy.supervise.restarting import RestartedKind, Restarting, RestartJob
from tests.fakes.clock import FakeClock
from tests.fakes.ray_calls import Ray, Ref


class Fake:
    """A cluster, its supervisor and the check of the installed version.

    Attributes:
        left: requests left at the process, for each question.
        told: workers last sent to the routers.
    """

    drain_timeout_s = 10.0

    def __init__(self, left: Sequence[int], refusals: Sequence[str | None] = ("",)) -> None:
        self.left = list(left)
        self._leaving: set[str] = set()
        self.told: list[list[str]] = []
        self.restarted: list[str] = []
        self.joined = True
        self.why = ""
        self._refusals = list(refusals)

    def _next(self) -> int:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def begin_leaving(self, names: Collection[str]) -> None:
        self._leaving.update(names)

    def let_stay(self, names: Collection[str]) -> None:
        self._leaving.difference_update(names)

    def tell_routers(self) -> list[Any]:
        names = [name for name in ("p0", "d0") if name not in self._leaving]
        self.told.append(names)
        return [Ref({"d0": self._next()} if "d0" not in names else {})]

    def is_planned(self, name: str) -> bool:
        return True

    def actor(self, name: str) -> Any:
        fake = self

        class Actor:
            class leave:
                @staticmethod
                def remote() -> Ref:
                    return Ref(fake._next())

        return Actor()

    def has_joined(self, name: str) -> bool:
        return self.joined

    def failure(self, name: str) -> str:
        return self.why

    def restart(self, name: str) -> None:
        self.restarted.append(name)
        self.joined = False

    def refusal(self) -> str | None:
        return self._refusals.pop(0) if len(self._refusals) > 1 else self._refusals[0]

    def give_up(self) -> None:
        self.restarted.append("nothing more")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(router_changes, "ray", Ray())
    monkeypatch.setattr(scaling, "ray", Ray())
    monkeypatch.setattr(router_changes.time, "monotonic", clock)
    return clock


KINDS: dict[str, RestartedKind] = {"router-0": "router", "d0": "worker", "store-0": "store"}


def begin(fake: Fake, name: str) -> tuple[RestartJob, Restarting]:
    job = RestartJob(name)
    unknown: Any = fake
    return job, Restarting(job, unknown, unknown, unknown, KINDS[name])


def lines(job: RestartJob) -> list[str]:
    said = []
    while line := job.next_line(0.0):
        said.append(line)
    return said


def test_router_is_drained_and_started_again(clock: FakeClock) -> None:
    fake = Fake([2, 2, 1, 0], refusals=[None, None, ""])
    job, change = begin(fake, "router-0")
    while not fake.restarted:
        assert not change.take_turn()
    assert lines(job) == [
        "router-0: requests left: 2; waiting 10 s at most",
        "router-0: requests left: 1; waiting 10 s at most",
        "router-0: starting again",
    ]
    assert not change.take_turn()
    fake.joined = True
    assert change.take_turn()
    assert lines(job) == ["router-0: ready"] and job.error == "" and not fake.told


def test_router_s_last_requests_go_on_elsewhere(clock: FakeClock) -> None:
    fake = Fake([3])
    job, change = begin(fake, "router-0")
    change.take_turn()
    clock.advance(11.0)
    change.take_turn()
    assert fake.restarted == ["router-0"]
    assert "Requests that go on at another router: 3" in lines(job)


def test_worker_gets_no_requests_until_it_is_back(clock: FakeClock) -> None:
    fake = Fake([1, 0])
    job, change = begin(fake, "d0")
    while not fake.restarted:
        assert not change.take_turn()
    assert all(told == ["p0"] for told in fake.told)
    fake.joined = True
    assert change.take_turn()
    assert fake.told[-1] == ["p0", "d0"] and job.error == ""


def test_store_is_restarted_at_once(clock: FakeClock) -> None:
    fake = Fake([])
    job, change = begin(fake, "store-0")
    assert not change.take_turn() and fake.restarted == ["store-0"]
    fake.joined = True
    assert change.take_turn()
    assert lines(job) == ["store-0: starting again", "store-0: ready"] and job.error == "" and not fake.told


@pytest.mark.parametrize("name", ["router-0", "d0", "store-0"])
def test_refused_version_ends_nothing(clock: FakeClock, name: str) -> None:
    fake = Fake([0], refusals=[None, "the installed tandem 9 cannot join"])
    job, change = begin(fake, name)
    assert not change.take_turn() and change.take_turn()
    assert job.error == "the installed tandem 9 cannot join" and not fake.restarted and not fake.told


def test_failed_start_is_told_and_the_worker_stays_planned(clock: FakeClock) -> None:
    fake = Fake([0])
    job, change = begin(fake, "d0")
    while not fake.restarted:
        change.take_turn()
    fake.why = "no memory"
    assert change.take_turn()
    assert job.error == "d0: no memory; it is tried again" and fake.told[-1] == ["p0", "d0"]


def test_process_that_is_down_is_left_to_the_supervisor(clock: FakeClock) -> None:
    fake = Fake([0])
    fake.joined = False
    job, change = begin(fake, "d0")
    assert change.take_turn()
    assert job.error == "d0 is starting already" and not fake.restarted

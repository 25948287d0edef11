"""Changes of the number of workers, turn by turn, with fake processes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from ray.exceptions import RayError

from tandem.config import WorkerKind
from tandem.deploy.supervise import scaling
from tandem.deploy.supervise.scaling import ScaleJob, Scaling, check_kinds
from tests.fakes.ray_calls import Ray, Ref


class Call:
    def __init__(self, do: Callable[[], Any]) -> None:
        self._do = do

    def remote(self) -> Ref:
        return Ref(self._do())


class Fake:
    """A cluster of p0, p1, d0 and its supervisor.

    Attributes:
        routers: each router's answer: requests by worker; None: no answer.
        told: workers last sent to routers.
        doing: progress of each new worker.
        events: actions in order.
    """

    drain_timeout_s = 10.0

    def __init__(self) -> None:
        self._names = ["p0", "p1", "d0"]
        self._leaving: set[str] = set()
        self.routers: list[Any] = [{}, {}]
        self.told: list[str] = []
        self.doing: dict[str, str] = {}
        self.joined: set[str] = set()
        self.failures: dict[str, str] = {}
        self.events: list[str] = []

    # --- the cluster ---

    @property
    def worker_names(self) -> list[str]:
        return list(self._names)

    def add_workers(self, plans: Mapping[str, Any]) -> None:
        self._names += plans

    def remove_workers(self, names: Sequence[str]) -> None:
        self.events += [f"end {name}" for name in names]
        self._names = [name for name in self._names if name not in names]

    def begin_leaving(self, names: Collection[str]) -> None:
        self._leaving.update(names)

    def let_stay(self, names: Collection[str]) -> None:
        self._leaving.difference_update(names)

    def tell_routers(self) -> list[Any]:
        self.told = [name for name in self._names if name not in self._leaving]
        return [Ref(answer) for answer in self.routers]

    def actor(self, name: str) -> Any:
        class Actor:
            progress = Call(lambda: self.doing.get(name, "loading"))
            stop = Call(lambda: self.events.append(f"stop {name}") or 0)

        return Actor()

    # --- the supervisor ---

    def add(self, name: str, kind: Any) -> None:
        assert name in self.told, "routers know a worker before it comes"
        self.events.append(f"start {name}")

    def has_joined(self, name: str) -> bool:
        return name in self.joined

    def failure(self, name: str) -> str:
        return self.failures.get(name, "")

    def retire(self, name: str) -> None:
        self.events.append(f"retire {name}")

    def forget(self, name: str) -> None:
        self.events.append(f"forget {name}")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scaling, "ray", Ray())
    monkeypatch.setattr(scaling, "time", clock)
    return clock


def change(fake: Fake, joining: Sequence[str] = (), leaving: Sequence[str] = (), *, join_first: bool = True) -> Scaling:
    plans = dict.fromkeys(joining)
    job = ScaleJob({})
    made = Scaling(job, fake, fake, None, plans, leaving, join_first=join_first)  # type: ignore[arg-type]
    made.job = job  # type: ignore[attr-defined]
    return made


def turns(made: Scaling, at_most: int = 20) -> int:
    """Returns the number of turns until the end."""
    for number in range(at_most):
        if made.take_turn():
            return number + 1
    raise AssertionError("it is not over")


def said(made: Scaling) -> list[str]:
    lines = []
    while (line := made.job.next_line(0.01)) is not None:  # type: ignore[attr-defined]
        assert line, "its end was not told"
        lines.append(line)
    return lines


def test_new_workers_are_there_before_old_ones_leave() -> None:
    fake = Fake()
    made = change(fake, ["d1"], ["p1"])
    assert not made.take_turn() and fake.events == ["start d1"] and fake.told == ["p0", "p1", "d0", "d1"]
    assert not made.take_turn() and fake.events == ["start d1"]
    fake.joined.add("d1")
    turns(made)
    assert fake.events == ["start d1", "retire p1", "forget p1", "stop p1", "end p1"]
    assert fake.told == fake.worker_names == ["p0", "d0", "d1"]
    assert said(made)[0] == "d1: starting" and made.job.error == ""  # type: ignore[attr-defined]


def test_without_room_old_ones_leave_first() -> None:
    fake = Fake()
    fake.joined.add("d1")
    turns(change(fake, ["d1"], ["p1"], join_first=False))
    assert fake.events == ["retire p1", "forget p1", "stop p1", "end p1", "start d1"]


def test_a_worker_leaves_when_no_router_has_a_request_there() -> None:
    fake = Fake()
    fake.routers = [{"p1": 0}, {"p1": 2}]
    made = change(fake, leaving=["p1"])
    for _ in range(5):
        assert not made.take_turn()
    # New requests go elsewhere at once.
    assert fake.told == ["p0", "d0"] and fake.events == ["retire p1"]
    # A silent router may have requests; a dead one has none.
    fake.routers = [{"p1": 0}, None]
    for _ in range(5):
        assert not made.take_turn()
    fake.routers = [{"p1": 0}, RayError()]
    clock_moves(made)
    turns(made)
    assert "end p1" in fake.events


def clock_moves(made: Scaling) -> None:
    """The unanswered question times out."""
    scaling.time.now += 7.0  # type: ignore[attr-defined]
    made.take_turn()


def test_what_takes_too_long_begins_again_elsewhere(clock: Clock) -> None:
    fake = Fake()
    fake.routers = [{"p1": 3}, {"p1": 1}]
    made = change(fake, leaving=["p1"])
    assert not made.take_turn()
    clock.now += 11.0
    turns(made)
    assert "end p1" in fake.events and "Requests that begin again elsewhere: 4" in said(made)


@pytest.mark.parametrize("why", ["a failure", "no process"])
def test_what_cannot_be_started_leaves_the_cluster_as_it_was(why: str, clock: Clock) -> None:
    fake = Fake()
    made = change(fake, ["d1", "d2"], ["p1"])
    if why == "no process":
        fake.actor = lambda name: None  # type: ignore[method-assign]
    made.take_turn()
    fake.joined.add("d1")
    if why == "a failure":
        fake.failures["d2"] = "no memory"
    else:
        clock.now += 121.0
    turns(made)
    error = made.job.error  # type: ignore[attr-defined]
    assert ("d2: no memory" in error) if why == "a failure" else ("no process for d2 within 120 s" in error)
    assert error.endswith("the cluster is as it was before")
    assert fake.worker_names == fake.told == ["p0", "p1", "d0"]
    assert "retire p1" not in fake.events and {"end d1", "end d2"} <= set(fake.events)


def test_a_cluster_that_stops_says_so_to_who_waits() -> None:
    made = change(Fake(), ["d1"])
    made.take_turn()
    made.give_up()
    said(made)
    assert made.job.error == "the cluster is stopping"  # type: ignore[attr-defined]


def test_workers_that_are_all_alike_are_not_mixed_with_others() -> None:
    nobody: dict[WorkerKind, int] = dict.fromkeys(("prefill", "decode", "both", "any"), 0)
    check_kinds({"any": 2}, nobody | {"any": 3})
    check_kinds({"prefill": 1, "decode": 1}, nobody | {"prefill": 2, "decode": 1})
    with pytest.raises(ValueError, match="the 2 workers of this cluster are all alike: say how many with num_any"):
        check_kinds({"any": 2}, nobody | {"any": 2, "prefill": 1, "decode": 1})
    with pytest.raises(ValueError, match=r"have roles \(1 prefill, 2 decode\): say how many with num_prefill, "):
        check_kinds({"prefill": 1, "decode": 2}, nobody | {"prefill": 1, "decode": 2, "any": 3})

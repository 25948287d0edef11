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
        self.node_timeout_s = 0.0
        self.unplaced: set[str] = set()
        self.reserved: list[str] = []

    # --- the cluster ---

    def reserve(self, names: Sequence[str]) -> None:
        self.reserved += names

    def is_placed(self, name: str) -> bool:
        return name not in self.unplaced

    def need_of(self, name: str) -> str:
        return "{CPU: 1, GPU: 1}"

    def release(self, names: Sequence[str]) -> None:
        self.reserved = [name for name in self.reserved if name not in names]

    @property
    def worker_names(self) -> list[str]:
        return list(self._names)

    def add_workers(self, plans: Mapping[str, Any]) -> None:
        self._names += plans

    def remove_workers(self, names: Sequence[str]) -> None:
        self.events += [f"end {name}" for name in names]
        self.release(names)
        self._names = [name for name in self._names if name not in names]

    def is_planned(self, name: str) -> bool:
        return name in self._names

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
    return Scaling(job, fake, fake, None, plans, leaving, join_first=join_first)  # type: ignore[arg-type]


def turns(made: Scaling, at_most: int = 20) -> int:
    """Returns the number of turns until the end."""
    for number in range(at_most):
        if made.take_turn():
            return number + 1
    raise AssertionError("it is not over")


def said(made: Scaling) -> list[str]:
    lines = []
    while (line := made.job.next_line(0.01)) is not None:
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
    assert said(made)[0] == "d1: starting" and made.job.error == ""


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
    error = made.job.error
    assert ("d2: no memory" in error) if why == "a failure" else ("no process for d2 within 120 s" in error)
    assert error.endswith("the cluster is as it was before")
    assert fake.worker_names == fake.told == ["p0", "p1", "d0"]
    assert "retire p1" not in fake.events and {"end d1", "end d2"} <= set(fake.events)


def test_a_cluster_that_stops_says_so_to_who_waits() -> None:
    made = change(Fake(), ["d1"])
    made.take_turn()
    made.give_up()
    said(made)
    assert made.job.error == "the cluster is stopping"


def waiting_change(fake: Fake, clock: Clock, *joining: str) -> Scaling:
    """Returns a scale-up that waits for a node for its last worker."""
    fake.node_timeout_s = 100.0
    fake.unplaced.add(joining[-1])
    made = change(fake, joining)
    fake.joined.update(joining)
    for _ in range(3):
        clock.now += 2.0
        assert not made.take_turn()
    assert made.is_waiting and not made.may_go_on() and fake.reserved == list(joining)
    return made


def test_workers_without_room_wait_for_a_node_and_others_start(clock: Clock) -> None:
    fake = Fake()
    made = waiting_change(fake, clock, "d1", "d2")
    assert fake.told == ["p0", "p1", "d0", "d1"] and "start d1" in fake.events
    fake.unplaced.clear()
    assert made.may_go_on()
    turns(made)
    assert fake.told == fake.worker_names == ["p0", "p1", "d0", "d1", "d2"]
    line = next(line for line in said(made) if line.startswith("waiting"))
    assert line == "waiting for Ray to add a node: d2 needs {CPU: 1, GPU: 1}; 96 s at most"


def test_the_last_numbers_wait(clock: Clock) -> None:
    """So that numbers have no gaps if no node comes."""
    fake = Fake()
    fake.node_timeout_s = 100.0
    fake.unplaced.add("decode-1")
    made = change(fake, ["decode-1", "decode-2", "prefill-1"])
    fake.joined.add("prefill-1")
    made.take_turn()
    assert [event for event in fake.events if event.startswith("start")] == ["start prefill-1"]


def test_a_node_that_does_not_come_ends_the_wait(clock: Clock) -> None:
    fake = Fake()
    made = waiting_change(fake, clock, "d1")
    clock.now += 100.0
    assert made.may_go_on() and turns(made) == 1
    error = made.job.error
    assert error.startswith("d1: Ray has added no node within 100 s for {CPU: 1, GPU: 1}")
    assert fake.reserved == [] and fake.events == [] and fake.told == []


def test_a_wait_is_withdrawn_at_once(clock: Clock) -> None:
    fake = Fake()
    made = waiting_change(fake, clock, "d1", "d2")
    assert ScaleJob({}).replaces(made.job)
    made.withdraw("another one")
    assert made.job.error == "another one" and fake.reserved == ["d1"]
    assert fake.worker_names == ["p0", "p1", "d0", "d1"]


def test_without_an_autoscaler_lost_room_is_an_error(clock: Clock) -> None:
    fake = Fake()
    fake.unplaced.add("d1")
    made = change(fake, ["d1"])
    assert not made.take_turn() and not made.is_waiting
    clock.now += 11.0
    turns(made)
    assert "no room any more for {CPU: 1, GPU: 1}" in made.job.error and fake.reserved == []


def test_a_failing_ray_ends_the_change_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()

    def fail(names: Sequence[str]) -> None:
        fake.reserved.append(names[0])
        raise RayError("its GCS is away")

    monkeypatch.setattr(fake, "reserve", fail)
    made = change(fake, ["d1", "d2"])
    turns(made)
    assert made.job.error == "Ray reserves no room: its GCS is away; the cluster is as it was before"
    assert fake.reserved == [] and fake.worker_names == ["p0", "p1", "d0"]


def test_workers_that_are_all_alike_are_not_mixed_with_others() -> None:
    nobody: dict[WorkerKind, int] = dict.fromkeys(("prefill", "decode", "both", "any"), 0)
    check_kinds({"any": 2}, nobody | {"any": 3})
    check_kinds({"prefill": 1, "decode": 1}, nobody | {"prefill": 2, "decode": 1})
    with pytest.raises(ValueError, match="all workers of this cluster are alike: say how many with num_any"):
        check_kinds({"any": 2}, nobody | {"any": 2, "prefill": 1, "decode": 1})
    with pytest.raises(ValueError, match=r"have roles \(1 prefill, 2 decode\): say how many with num_prefill, "):
        check_kinds({"prefill": 1, "decode": 2}, nobody | {"prefill": 1, "decode": 2, "any": 3})

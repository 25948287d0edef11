"""Nodes that are announced to go are emptied in time, with fake processes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from tandem.deploy.supervise import evacuating, router_changes, scaling
from tandem.deploy.supervise.evacuating import (
    LOOK_INTERVAL_S,
    MARGIN_S,
    Evacuating,
    LeavingNodes,
    RouterLeaving,
    may_leave,
)
from tests.fakes.clock import FakeClock
from tests.fakes.ray_calls import Ray, Ref

WALL_S = 1_000_000.0


class Fake:
    """A cluster of w0 and w1, and its supervisor. Attributes: left: requests on w0 and on the router."""

    drain_timeout_s = 10.0

    def __init__(self) -> None:
        self.worker_names = ["w0", "w1"]
        self._leaving: set[str] = set()
        self.told: list[str] = []
        self.left = 2
        self.joined: set[str] = set()
        self.events: list[str] = []

    def add_workers(self, plans: Mapping[str, Any]) -> None:
        self.worker_names += plans

    def remove_workers(self, names: Sequence[str]) -> None:
        self.events += [f"end {name}" for name in names]
        self.worker_names = [name for name in self.worker_names if name not in names]

    def begin_leaving(self, names: Collection[str]) -> None:
        self._leaving.update(names)

    def tell_routers(self) -> list[Ref]:
        self.told = [name for name in self.worker_names if name not in self._leaving]
        return [Ref({} if "w0" in self.told else {"w0": self.left})]

    def actor(self, name: str) -> Any:
        fake = self

        class Actor:
            class leave:
                @staticmethod
                def remote() -> Ref:
                    return Ref(fake.left)

        return Actor() if name.startswith("router") else None

    def add(self, name: str, kind: Any) -> None:
        self.events.append(f"start {name}")

    def has_joined(self, name: str) -> bool:
        return name in self.joined

    def retire(self, name: str) -> None:
        self.events.append(f"retire {name}")

    def forget(self, name: str) -> None:
        self.events.append(f"forget {name}")

    def restart(self, name: str) -> None:
        self.events.append(f"restart {name}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(scaling, "ray", Ray())
    monkeypatch.setattr(router_changes, "ray", Ray())
    for module in (evacuating, router_changes, scaling):
        monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


def evacuation(fake: Fake, end: float) -> Evacuating:
    unknown: Any = fake
    return Evacuating(unknown, unknown, unknown, dict.fromkeys(["w2"]), ["w0"], end)  # type: ignore[arg-type]


def test_another_worker_serves_before_one_leaves(clock: FakeClock) -> None:
    fake = Fake()
    made = evacuation(fake, clock() + 100.0)
    for _ in range(5):
        assert not made.take_turn()
    assert fake.events == ["start w2"] and fake.told == ["w0", "w1", "w2"]
    fake.joined.add("w2")
    assert not made.take_turn()
    assert fake.told == ["w1", "w2"] and fake.events[-1] == "retire w0"
    fake.left = 0
    while not made.take_turn():
        pass
    assert fake.events[-2:] == ["forget w0", "end w0"] and fake.told == ["w1", "w2"]


def test_a_worker_leaves_in_time_without_another(clock: FakeClock) -> None:
    """Its requests have the drain timeout, and then restart elsewhere before the node ends."""
    fake = Fake()
    end = clock() + 100.0
    made = evacuation(fake, end)
    made.take_turn()
    clock.advance(100.0 - fake.drain_timeout_s - MARGIN_S - 1.0)
    assert not made.take_turn() and "retire w0" not in fake.events
    clock.advance(1.0)
    assert not made.take_turn() and fake.events[-1] == "retire w0"
    clock.advance(fake.drain_timeout_s)
    while not made.take_turn():
        pass
    assert fake.events[-1] == "end w0" and clock() == end - MARGIN_S
    # The supervisor starts it when there is room.
    assert fake.told == ["w1", "w2"]


def test_a_router_ends_when_its_requests_have(clock: FakeClock) -> None:
    fake: Any = Fake()
    made = RouterLeaving("router-1", fake, fake, clock() + 100.0)
    for _ in range(3):
        assert not made.take_turn()
    fake.left = 0
    while not made.take_turn():
        pass
    assert fake.events == ["restart router-1"]


def test_the_last_router_stays() -> None:
    assert may_leave("router-1", ["router-0", "router-1"], ["router-1", "worker-0"])
    assert not may_leave("router-1", ["router-0", "router-1"], ["router-0", "router-1"])
    assert not may_leave("router-0", ["router-0"], ["router-0"])


def test_each_look_names_all_processes_with_their_ends(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    found = {"a": WALL_S + 60.0, "b": 0.0}
    on = {"a": ["w0", "router-0"], "b": ["w1"], "c": ["w2"]}
    began = clock()
    nodes = LeavingNodes(lambda: found, on.__getitem__, 900.0, lambda: WALL_S, clock)
    ends = {"w0": began + 60.0, "router-0": began + 60.0, "w1": began + 900.0}
    assert nodes.take() == ends and nodes.take() is None
    clock.advance(LOOK_INTERVAL_S)
    # The end does not move with the time of the look.
    assert nodes.take() == ends
    assert [record.message for record in caplog.records] == [
        "a node of Ray is announced to go in 60 s; on it: w0, router-0",
        "a node of Ray is announced to go at a time not said; on it: w1",
    ]
    found.clear()
    clock.advance(LOOK_INTERVAL_S)
    assert nodes.take() == {}

"""Exchanges of plans and demands with routers that answer late or never."""

from typing import Any

import pytest
from ray.exceptions import RayError

from tandem.deploy.supervise import role_plans
from tandem.deploy.supervise.role_planner import RolePlanner
from tandem.deploy.supervise.role_plans import FRESH_S, RolePlans
from tandem.router.workers.leans import RouterDemand
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.sizes import ClusterSize
from tests.fakes import ray_calls
from tests.fakes.clock import FakeClock
from tests.fakes.ray_calls import Ref


class Router:
    """Attributes: told: received leans, with the result of each call."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[str, str], Ref]] = []
        self.exchange_leans = self

    def remote(self, leans: dict[str, str], size: None) -> Ref:
        ref = Ref(None)
        self.told.append((leans, ref))
        return ref

    def answer(self, value: Any) -> None:
        self.told[-1][1].value = value


class Ray(ray_calls.Ray):
    def get(self, ref: Ref) -> Any:
        value = super().get(ref)
        return None if value == "nothing" else value


class Planner(RolePlanner):
    """Returns fixed plans. Attributes: asked: received demands."""

    def __init__(self) -> None:
        super().__init__(Objectives(), FakeClock())
        self.asked: list[dict[str, RouterDemand]] = []

    def plan(self, demands: Any) -> Any:
        self.asked.append(dict(demands))
        return {"w0": "prefill"} if demands else {}


class Plans:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(role_plans, "ray", Ray())
        self.clock, self.planner = FakeClock(), Planner()
        self.routers = {"a": Router(), "b": Router()}
        self.plans = RolePlans(self.planner, lambda: self.routers, lambda: None, self.clock)

    def turn(self, seconds: float = 0.6) -> None:
        self.clock.advance(seconds)
        self.plans.take_turn()


def test_every_router_is_told_again_and_again_and_asked_in_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Plans(monkeypatch)
    at.turn()
    for router in at.routers.values():
        router.answer(RouterDemand(prompts=1))
    at.turn()
    assert at.planner.asked == [{}, {"a": RouterDemand(prompts=1), "b": RouterDemand(prompts=1)}]
    assert [[leans for leans, _ in router.told] for router in at.routers.values()] == [[{}, {"w0": "prefill"}]] * 2
    # No exchange between two plans.
    at.turn(0.1)
    assert len(at.planner.asked) == 2


def test_a_router_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Plans(monkeypatch)
    for _ in range(3):
        at.turn()
        at.routers["a"].answer(RouterDemand(prompts=7))
    assert len(at.routers["a"].told) == 3
    assert len(at.routers["b"].told) == 1
    assert at.planner.asked[-1] == {"a": RouterDemand(prompts=7)}


def test_a_router_that_has_died_is_told_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Plans(monkeypatch)
    at.turn()
    at.routers["a"].answer(RouterDemand(prompts=1))
    at.routers["b"].answer(RayError("dead"))
    at.turn()
    at.routers["a"].answer("nothing")
    at.routers["b"].answer(RayError("dead"))
    at.routers["b"] = Router()
    at.turn()
    assert at.routers["b"].told[-1][0] == {"w0": "prefill"}


def test_what_was_said_long_ago_is_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Plans(monkeypatch)
    at.turn()
    at.routers["a"].answer(RouterDemand(prompts=1))
    at.turn()
    assert at.planner.asked[-1] == {"a": RouterDemand(prompts=1)}
    at.turn(FRESH_S)
    assert at.planner.asked[-1] == {}


def test_routers_are_told_that_no_number_follows_the_load_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_plans, "ray", Ray())
    clock, router, told = FakeClock(), Router(), list[ClusterSize | None]()
    monkeypatch.setattr(router, "remote", lambda leans, size: told.append(size) or Ref("nothing"))
    sizes: list[ClusterSize | None] = [ClusterSize(), None]
    plans = RolePlans(None, lambda: {"a": router}, lambda: sizes[0], clock)
    for _ in range(2):
        clock.advance(0.6)
        plans.take_turn()
        sizes.pop(0) if len(sizes) > 1 else None
    assert told == [ClusterSize(), None]
    clock.advance(FRESH_S)
    plans.take_turn()
    clock.advance(0.6)
    plans.take_turn()
    assert len(told) == 2, "the workers have fixed roles and a fixed number"

"""Routers that join while workers connect."""

from collections.abc import Sequence
from typing import Any

import pytest

from tandem.deploy.supervise import router_changes, scaling
from tandem.deploy.supervise.router_changes import join_router
from tests.fakes.ray_calls import Ray, Ref


class Fake:
    """A cluster and its supervisor. Attributes: events: actions in order."""

    drain_timeout_s = 10.0

    def __init__(self) -> None:
        self.events: list[str] = []
        self.joined: Sequence[str] = ()

    def add_router(self, name: str) -> None:
        self.events.append(f"add {name}")

    def tell_workers(self) -> list[Any]:
        self.events.append("tell")
        return [Ref(0)]

    def add(self, name: str, kind: Any) -> None:
        self.events.append(f"start {name}")

    def has_joined(self, name: str) -> bool:
        return name in self.joined

    def failure(self, name: str) -> str:
        return ""


def test_workers_that_joined_meanwhile_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (router_changes, scaling):
        monkeypatch.setattr(module, "ray", Ray())
    f: Any = Fake()
    steps = join_router(f, f, "router-1", None)  # type: ignore[arg-type]
    next(steps)
    assert f.events == ["add router-1", "tell", "start router-1"]
    f.joined = ["router-1"]
    assert list(steps) == [] and f.events[-1] == "tell"

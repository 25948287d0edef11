"""Questions to a cluster's processes, on a fake Ray."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.on_ray.ray_module import RayError
from tandem.deploy.supervise import processes
from tandem.deploy.supervise.processes import Processes


class Method:
    """An actor's method."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Router:
    """Attributes: kept: request lines; num_left: running requests."""

    def __init__(self, kept: list[str], num_left: int) -> None:
        self.kept = kept
        self.drain = Method(lambda timeout_s: num_left)
        self.probe = Method(self._probe)

    def _probe(self) -> list[str]:
        lines, self.kept = self.kept, []
        return lines


def failing() -> Any:
    router = Router([], 0)
    router.probe = Method(lambda: RayError())
    return router


def get(ref: Any) -> Any:
    if isinstance(ref, Exception):
        raise ref
    return ref


@pytest.mark.parametrize("keeps", [True, False])
def test_a_drain_shows_the_lines_of_requests_that_end_in_it(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ray", SimpleNamespace(wait=lambda refs, **_: (refs, []), get=get))
    shown: list[str] = []
    unused: Any = None
    cluster = Processes(unused, unused, unused, shown.append, unused)
    cluster.actors = {"router-0": Router(["a", "b"], 2), "router-1": failing()}
    config: Any = SimpleNamespace(keeps_request_lines=keeps)
    # After a takeover, a missing router is not asked.
    cluster.router_configs = dict.fromkeys(("router-0", "router-1", "router-2"), config)
    assert cluster.drain(1.0) == 2
    assert shown == (["a", "b"] if keeps else [])

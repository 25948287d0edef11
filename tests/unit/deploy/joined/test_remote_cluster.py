"""A command and its cluster on a fake Ray; a later cluster may have the same name."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.joined import remote_cluster
from tandem.deploy.joined.remote_cluster import GoneError, RemoteCluster
from tandem.deploy.joined.supervisor_actor import STARTING, SupervisorOrder, SupervisorState
from tandem.deploy.on_ray.ray_module import RayActorError
from tandem.deploy.on_ray.sealed_actor import SealedActor


class FakeRay:
    """Attributes: named: actor with the name, or None; ended: killed actors and removed state."""

    def __init__(self) -> None:
        self.named: Any = None
        self.ended: list[str] = []

    def get_actor(self, name: str, namespace: str) -> Any:
        if self.named is None:
            raise ValueError(name)
        return self.named

    def get(self, ref: Any, timeout: float) -> Any:
        raise RayActorError

    def kill(self, actor: Any) -> None:
        self.ended.append(actor._actor_id)


class FakeHosted:
    ray: FakeRay

    def __init__(self, *_: Any) -> None:
        pass

    def is_up(self) -> bool:
        return True

    def end_all(self) -> None:
        self.ray.ended.append("processes")

    def forget(self) -> None:
        self.ray.ended.append("state")


def actor(actor_id: str) -> Any:
    return SimpleNamespace(_actor_id=actor_id, state=SimpleNamespace(remote=lambda from_line=0: None))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeHosted.ray = FakeRay()
    monkeypatch.setattr(remote_cluster, "ray", ray)
    monkeypatch.setattr(remote_cluster, "HostedRay", FakeHosted)
    monkeypatch.setattr(remote_cluster, "POLL_INTERVAL_S", 0.0)
    return ray


def test_a_restarting_supervisor_is_waited_for(ray: FakeRay) -> None:
    own = ray.named = actor("own")
    cluster = RemoteCluster("chat", "127.0.0.1:1", own)
    assert cluster.look() is None
    cluster.end()
    assert ray.ended == ["own", "processes", "state"]


def test_an_ended_supervisor_is_gone(ray: FakeRay) -> None:
    cluster = RemoteCluster("chat", "127.0.0.1:1", actor("own"))
    with pytest.raises(GoneError):
        cluster.look()
    cluster.end()
    assert ray.ended == ["own", "processes", "state"]


def test_a_later_cluster_of_the_same_name_is_left_alone(ray: FakeRay) -> None:
    ray.named = actor("another")
    cluster = RemoteCluster("chat", "127.0.0.1:1", actor("own"))
    with pytest.raises(GoneError):
        cluster.look()
    cluster.end()
    assert ray.ended == ["own"]


class Told(SealedActor[SupervisorOrder]):
    order_type = SupervisorOrder


class FakeSupervisor:
    """Answers calls at once.

    Attributes:
        life: current life, with its own key.
    """

    _actor_id = "own"

    def __init__(self) -> None:
        self.begin("first")

    def begin(self, life: str) -> None:
        self.life, self.told = life, Told(None)

    def __getattr__(self, name: str) -> Any:
        answers = {"state": self._state, "public_key": self.told.public_key, "tell": self.told.tell}
        return SimpleNamespace(remote=answers[name])

    def _state(self, from_line: int = 0) -> SupervisorState:
        return SupervisorState(self.life, STARTING, {}, [], 0, "", "", {}, "", "", False)


def test_the_starting_command_alone_sends_each_life_its_order(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)
    order = SupervisorOrder(ClusterConfig("m", api_keys=("a-secret",)), {"HF_TOKEN": "another-secret"})
    assert "secret" not in repr(order)
    supervisor = FakeSupervisor()
    watching = RemoteCluster("chat", "127.0.0.1:1", supervisor)
    starting = RemoteCluster("chat", "127.0.0.1:1", supervisor, order)
    for life in ("first", "second"):
        supervisor.begin(life)
        assert watching.look() is not None
        with pytest.raises(TimeoutError):
            supervisor.told._wait_order(0.0)
        assert starting.look() is not None
        assert supervisor.told._wait_order(0.0) == order

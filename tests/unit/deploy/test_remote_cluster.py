"""A command and its cluster, whose name may be another's by now, on a Ray played by the test."""

from types import SimpleNamespace
from typing import Any

import pytest

from deploy import remote_cluster
from deploy.ray_module import RayActorError
from deploy.remote_cluster import GoneError, RemoteCluster


class FakeRay:
    """Attributes: named: who has the name; None: nobody; ended: what was ended."""

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


def test_a_supervisor_that_is_being_started_again_is_waited_for(ray: FakeRay) -> None:
    own = ray.named = actor("own")
    cluster = RemoteCluster("chat", "127.0.0.1:1", own)
    assert cluster.look() is None
    cluster.end()
    assert ray.ended == ["own", "processes", "state"]


def test_one_that_has_ended_is_gone(ray: FakeRay) -> None:
    cluster = RemoteCluster("chat", "127.0.0.1:1", actor("own"))
    with pytest.raises(GoneError):
        cluster.look()
    cluster.end()
    assert ray.ended == ["own", "processes", "state"]


def test_another_cluster_of_the_same_name_is_left_alone(ray: FakeRay) -> None:
    ray.named = actor("another")
    cluster = RemoteCluster("chat", "127.0.0.1:1", actor("own"))
    with pytest.raises(GoneError):
        cluster.look()
    cluster.end()
    assert ray.ended == ["own"]

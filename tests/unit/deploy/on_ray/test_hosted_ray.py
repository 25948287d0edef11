"""What a supervisor keeps for its next life, and how that opens it, with Ray's store of keys played by the test."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.on_ray import hosted_ray
from tandem.deploy.on_ray.hosted_ray import ORDER, STATE, HostedRay
from tandem.deploy.on_ray.ray_module import RayActorError
from tandem.deploy.on_ray.sealed_actor import SealedActor, sealed_order

NOTE = {"api_keys": ("a-secret",)}


class FakeRay:
    """References are the answers themselves, or the errors.

    Attributes:
        actor_id: of the process.
        kept: by namespace and key.
        actors: the cluster's processes by their names; None: it dies when it is asked.
    """

    def __init__(self) -> None:
        self.actor_id = "a"
        self.kept: dict[tuple[bytes, bytes], bytes] = {}
        self.actors: dict[str, SealedActor[Any] | None] = {}

    def get_runtime_context(self) -> "FakeRay":
        return self

    def get_actor_id(self) -> str:
        return self.actor_id

    def _internal_kv_put(self, key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> None:
        assert overwrite
        self.kept[namespace, key] = value

    def _internal_kv_get(self, key: bytes, *, namespace: bytes) -> bytes | None:
        return self.kept.get((namespace, key))

    def list_named_actors(self, *, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": "tandem-chat"} for name in (*self.actors, "ports-10.0.0.1.0", "supervisor")]

    def get_actor(self, name: str, namespace: str) -> Any:
        if name.startswith("ports"):
            return SimpleNamespace()
        actor = self.actors[name]
        call = actor.share_cluster_key if actor is not None else lambda public_key: RayActorError()
        return SimpleNamespace(share_cluster_key=SimpleNamespace(remote=call))

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref: Any) -> Any:
        if isinstance(ref, Exception):
            raise ref
        return ref


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(hosted_ray, "ray", fake)
    monkeypatch.setattr(hosted_ray, "internal_kv", fake)
    monkeypatch.setattr(hosted_ray, "list_named_actors", fake.list_named_actors)
    return fake


def hosted(cluster: str = "chat") -> HostedRay:
    return HostedRay("127.0.0.1:1", cluster)


def process_of(supervisor: HostedRay | None = None) -> SealedActor[Any]:
    """One that a supervisor has started and told; None: not yet."""
    actor = SealedActor[Any](None)
    if supervisor is not None:
        actor.tell(sealed_order({}, actor.public_key(), supervisor._own_keys().private_key))
    return actor


def test_only_what_the_same_supervisor_saved_is_gone_on_with(ray: FakeRay) -> None:
    """One that was ended for good may have left its state, and another may have begun under its name since."""
    own = hosted()
    assert own.saved(STATE) is None
    own.save(STATE, NOTE)
    assert own.saved(STATE) == NOTE and own.saved(ORDER) is None and hosted("other").saved(STATE) is None
    ray.actor_id = "b"
    assert own.saved(STATE) is None


def test_ray_cannot_read_what_it_keeps_and_the_next_life_learns_how_from_any_process(ray: FakeRay) -> None:
    first = hosted()
    first.save(STATE, NOTE)
    assert not any(b"a-secret" in kept for kept in ray.kept.values())
    # One is not told yet, one dies, one was left by another cluster of this name.
    ray.actors = {"decode-0.0": process_of(), "decode-1.0": None, "prefill-0.0": process_of(hosted())}
    assert hosted().saved(STATE) is None, "nobody knows"
    ray.actors["router-0.3"] = process_of(first)
    second = hosted()
    assert second.saved(STATE) == NOTE
    # It goes on with the same keys, which are what the processes have.
    second.save(STATE, {})
    assert hosted().saved(STATE) == {}

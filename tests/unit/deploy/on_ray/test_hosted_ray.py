"""A supervisor's notes for its next life, with a fake of Ray's key-value store."""

import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.on_ray import hosted_ray
from tandem.deploy.on_ray.codec import encode
from tandem.deploy.on_ray.hosted_ray import ORDER, STATE, HostedRay
from tandem.deploy.on_ray.ray_module import RayActorError
from tandem.deploy.on_ray.sealed import seal
from tandem.deploy.on_ray.sealed_actor import SealedActor, sealed_order


@dataclass(frozen=True)
class Note:
    api_keys: tuple[str, ...] = ()


class Process(SealedActor[Note]):
    order_type = Note


NOTE = Note(("a-secret",))


class FakeRay:
    """References are the answers themselves, or the errors.

    Attributes:
        actor_id: of the process.
        kept: by namespace and key.
        actors: the cluster's processes by name; None: the process dies when asked.
    """

    def __init__(self) -> None:
        self.actor_id = "a"
        self.kept: dict[tuple[bytes, bytes], bytes] = {}
        self.actors: dict[str, Process | None] = {}

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


def process_of(supervisor: HostedRay | None = None) -> Process:
    """Args: supervisor: sends the process its order; None: none does."""
    actor = Process(None)
    if supervisor is not None:
        actor.tell(sealed_order(NOTE, actor.public_key(), supervisor._own_keys().private_key))
    return actor


def test_only_notes_of_the_same_supervisor_count(ray: FakeRay) -> None:
    """A killed supervisor may leave its notes, and a new one may take its name."""
    own = hosted()
    assert own.saved(STATE, Note) is None
    own.save(STATE, NOTE)
    assert own.saved(STATE, Note) == NOTE and own.saved(ORDER, Note) is None
    assert hosted("other").saved(STATE, Note) is None
    ray.actor_id = "b"
    assert own.saved(STATE, Note) is None


def test_a_pickled_note_is_refused(ray: FakeRay) -> None:
    own = hosted()
    own.save(STATE, NOTE)
    (key,) = ray.kept
    sealed = seal(pickle.dumps(NOTE), own._own_keys().public_key)
    ray.kept[key] = encode(hosted_ray._Note("a", sealed))
    with pytest.raises(ValueError, match="not a Note of this version"):
        own.saved(STATE, Note)


def test_a_note_of_another_version_is_no_note(ray: FakeRay) -> None:
    own = hosted()
    own.save(STATE, NOTE)
    (key,) = ray.kept
    ray.kept[key] = pickle.dumps(("a", b"sealed"))
    assert own.saved(STATE, Note) is None


def test_ray_cannot_read_notes_and_the_next_life_gets_the_key_from_any_process(ray: FakeRay) -> None:
    first = hosted()
    first.save(STATE, NOTE)
    assert not any(b"a-secret" in kept for kept in ray.kept.values())
    # One has no order yet, one dies, one belongs to an earlier cluster of this name.
    ray.actors = {"decode-0.0": process_of(), "decode-1.0": None, "prefill-0.0": process_of(hosted())}
    assert hosted().saved(STATE, Note) is None, "no process has the key"
    ray.actors["router-0.3"] = process_of(first)
    second = hosted()
    assert second.saved(STATE, Note) == NOTE
    # The second life keeps the key that the processes have.
    second.save(STATE, Note())
    assert hosted().saved(STATE, Note) == Note()

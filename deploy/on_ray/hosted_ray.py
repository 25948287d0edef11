"""The Ray of a supervisor that is an actor. The cluster's actors outlive it, and its next life finds them by name."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.deploy.on_ray.codec import decode, encode
from tandem.deploy.on_ray.joined_ray import JoinedRay
from tandem.deploy.on_ray.ray_module import (
    PlacementGroup,
    PlacementGroupID,
    RayError,
    internal_kv,
    list_named_actors,
    placement_group_table,
    ray,
    remove_placement_group,
)
from tandem.deploy.on_ray.sealed import KeyPair, seal
from tandem.deploy.on_ray.sealed_actor import sealed_order

SUPERVISOR = "supervisor"
ORDER, STATE = "order", "state"
_PREFIX = "tandem-"
# Covers the time in which Ray brings a node the code.
_PROCESS_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Note:
    """Attributes: owner: actor id of the supervisor; sealed: encoded, then sealed to the cluster's key."""

    owner: str | None
    sealed: bytes


def namespace_of(cluster: str) -> str:
    return f"{_PREFIX}{cluster}"


def find_clusters() -> list[str]:
    named = list_named_actors(all_namespaces=True)
    found = [n["namespace"] for n in named if n["name"] == SUPERVISOR and n["namespace"].startswith(_PREFIX)]
    return sorted(namespace.removeprefix(_PREFIX) for namespace in found)


class HostedRay(JoinedRay):
    """A Ray that this process is already part of."""

    def __init__(self, address: str, cluster: str, *, spans_nodes: bool = False) -> None:
        self._own_namespace = namespace_of(cluster)
        # Opens the notes. The cluster's processes have it too, Ray does not.
        self._keys: KeyPair | None = None
        super().__init__(address, self._own_namespace, spans_nodes=spans_nodes)

    def start(self, num_processes: int) -> None:
        self.check_room(num_processes)

    def stop(self) -> None:
        """Does nothing."""

    def naming(self, name: str) -> dict[str, Any]:
        return {"name": name, "namespace": self._own_namespace, "lifetime": "detached"}

    def create(self, actor_class: Any, order: Any) -> Any:
        """Seals the order to the new actor's key, on a thread; returns at once."""
        actor = actor_class.remote(None)
        threading.Thread(target=self._tell, args=(actor, order), name="tell", daemon=True).start()
        return actor

    def group_name(self, process: str) -> str:
        return f"{self._own_namespace}/{process}"

    def find_actors(self) -> dict[str, dict[int, Any]]:
        """Returns the cluster's running actors by name and life, without the supervisor."""
        found: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        for named in list_named_actors(all_namespaces=True):
            name, _, life = named["name"].rpartition(".")
            if named["namespace"] == self._own_namespace and name and life.isdigit():
                with contextlib.suppress(ValueError):
                    found[name][int(life)] = ray.get_actor(named["name"], self._own_namespace)
        return found

    def end_all(self, besides: Iterable[Any] = ()) -> None:
        kept = {actor._actor_id for actor in besides}
        for lives in self.find_actors().values():
            for actor in lives.values():
                if actor._actor_id not in kept:
                    ray.kill(actor)

    def save(self, name: str, note: object) -> None:
        """Stores a sealed note for the next life of this actor. Args: name: ORDER or STATE; note: a dataclass."""
        sealed = seal(encode(note), self._own_keys().public_key)
        note_bytes = encode(_Note(_own_actor_id(), sealed))
        internal_kv._internal_kv_put(name.encode(), note_bytes, overwrite=True, namespace=self._key())

    def saved(self, name: str, kind: type[T]) -> T | None:
        """Returns the last note of an earlier life of this actor.

        None if there is none, another cluster's supervisor wrote it, or no process has the key.

        Raises:
            ValueError: the note is not of `kind`.
        """
        found = internal_kv._internal_kv_get(name.encode(), namespace=self._key())
        try:
            note = decode(_Note, found) if found else None
        except ValueError:
            # Another version of tandem wrote it for an earlier cluster of this name.
            note = None
        if note is None or note.owner != _own_actor_id():
            return None
        self._keys = self._keys or self._find_keys(note.sealed)
        return decode(kind, self._keys.open(note.sealed)) if self._keys is not None else None

    def forget(self) -> None:
        for group_id, group in placement_group_table().items():
            if group["name"].startswith(self.group_name("")) and group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(group_id)))
        for name in (ORDER, STATE):
            internal_kv._internal_kv_del(name.encode(), namespace=self._key())

    def _own_keys(self) -> KeyPair:
        if self._keys is None:
            self._keys = KeyPair()
        return self._keys

    def _tell(self, actor: Any, order: Any) -> None:
        # The supervision notices an actor that dies or does not start.
        with contextlib.suppress(RayError, TimeoutError):
            public_key = ray.get(actor.public_key.remote(), timeout=_PROCESS_TIMEOUT_S)
            actor.tell.remote(sealed_order(order, public_key, self._own_keys().private_key))

    def _find_keys(self, sealed: bytes) -> KeyPair | None:
        asking = KeyPair()
        waiting = [
            actor.share_cluster_key.remote(asking.public_key)
            for lives in self.find_actors().values()
            for actor in lives.values()
            # Port holders get no order.
            if hasattr(actor, "share_cluster_key")
        ]
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            answered, waiting = ray.wait(waiting, num_returns=1, timeout=remaining_s)
            for ref in answered:
                # Fails for an actor without an order, or of an earlier cluster of this name.
                with contextlib.suppress(RayError, ValueError):
                    keys = KeyPair(asking.open(ray.get(ref)))
                    keys.open(sealed)
                    return keys
        return None

    def _key(self) -> bytes:
        return self._own_namespace.encode()


def _own_actor_id() -> str | None:
    """The same in all lives of an actor; None outside an actor."""
    return ray.get_runtime_context().get_actor_id()

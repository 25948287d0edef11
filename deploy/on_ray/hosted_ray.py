"""The Ray that a cluster's supervisor is an actor of. What it starts outlives it, and has names in the cluster's own
namespace, by which the supervisor that Ray starts in its place finds it."""

import contextlib
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

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
# What a supervisor notes: what it was told, and what it has made of that since.
ORDER, STATE = "order", "state"
_PREFIX = "tandem-"
# Until a process is there, which may first have to be brought its code.
_PROCESS_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 10.0


def namespace_of(cluster: str) -> str:
    """Where the actors of a cluster have their names."""
    return f"{_PREFIX}{cluster}"


def find_clusters() -> list[str]:
    """The names of all clusters on the Ray that this process has joined."""
    named = list_named_actors(all_namespaces=True)
    found = [n["namespace"] for n in named if n["name"] == SUPERVISOR and n["namespace"].startswith(_PREFIX)]
    return sorted(namespace.removeprefix(_PREFIX) for namespace in found)


class HostedRay(JoinedRay):
    """A process that takes part already: neither started nor left by it."""

    def __init__(self, address: str, cluster: str, *, spans_nodes: bool = False) -> None:
        """
        Args:
            cluster: its name.
            spans_nodes: as for JoinedRay.
        """
        self._own_namespace = namespace_of(cluster)
        # Opens what is saved. Every process of the cluster has it, and Ray has not.
        self._keys: KeyPair | None = None
        super().__init__(address, self._own_namespace, spans_nodes=spans_nodes)

    def start(self, num_processes: int) -> None:
        """Makes sure that there is room.

        Raises:
            ValueError: there is none.
        """
        self.check_room(num_processes)

    def stop(self) -> None:
        """It goes on."""

    def naming(self, name: str) -> dict[str, Any]:
        return {"name": name, "namespace": self._own_namespace, "lifetime": "detached"}

    def create(self, actor_class: Any, order: Any) -> Any:
        """As RayBase; what it is told is sealed to a key that it makes. Returns at once."""
        actor = actor_class.remote(None)
        threading.Thread(target=self._tell, args=(actor, order), name="tell", daemon=True).start()
        return actor

    def group_name(self, process: str) -> str:
        """Of a process's placement group."""
        return f"{self._own_namespace}/{process}"

    def find_actors(self) -> dict[str, dict[int, Any]]:
        """The cluster's processes that run, by their names and by which life of them it is, but the supervisor."""
        found: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        for named in list_named_actors(all_namespaces=True):
            name, _, life = named["name"].rpartition(".")
            if named["namespace"] == self._own_namespace and name and life.isdigit():
                # It may have ended since.
                with contextlib.suppress(ValueError):
                    found[name][int(life)] = ray.get_actor(named["name"], self._own_namespace)
        return found

    def end_all(self, besides: Iterable[Any] = ()) -> None:
        """Ends the cluster's processes, but the supervisor and these."""
        kept = {actor._actor_id for actor in besides}
        for lives in self.find_actors().values():
            for actor in lives.values():
                if actor._actor_id not in kept:
                    ray.kill(actor)

    def save(self, name: str, note: Any) -> None:
        """Keeps what the next life of this actor begins with, for as long as Ray lives, where the cluster's processes
        alone can open it. Args: name: ORDER or STATE; an earlier note of that name is gone."""
        kept = pickle.dumps((_own_actor_id(), seal(pickle.dumps(note), self._own_keys().public_key)))
        internal_kv._internal_kv_put(name.encode(), kept, overwrite=True, namespace=self._key())

    def saved(self, name: str) -> Any:
        """What an earlier life of this actor saved last under that name. None: there is nothing; or it is another
        actor's, of a cluster of that name whose supervisor was ended before the rest of it, and which may have been
        configured otherwise; or no process answers that could open it."""
        found = internal_kv._internal_kv_get(name.encode(), namespace=self._key())
        owner, sealed = pickle.loads(found) if found else (None, b"")
        if not found or owner != _own_actor_id():
            return None
        self._keys = self._keys or self._find_keys(sealed)
        return pickle.loads(self._keys.open(sealed)) if self._keys is not None else None

    def forget(self) -> None:
        """The cluster has come to its end, and with it what it had taken of nodes."""
        for group_id, group in placement_group_table().items():
            if group["name"].startswith(self.group_name("")) and group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
        for name in (ORDER, STATE):
            internal_kv._internal_kv_del(name.encode(), namespace=self._key())

    def _own_keys(self) -> KeyPair:
        if self._keys is None:
            self._keys = KeyPair()
        return self._keys

    def _tell(self, actor: Any, order: Any) -> None:
        # One that ends before, or does not come up, is for its supervision to notice.
        with contextlib.suppress(RayError, TimeoutError):
            public_key = ray.get(actor.public_key.remote(), timeout=_PROCESS_TIMEOUT_S)
            actor.tell.remote(sealed_order(order, public_key, self._own_keys().private_key))

    def _find_keys(self, sealed: bytes) -> KeyPair | None:
        """What opens this, from any process of the cluster that runs."""
        asking = KeyPair()
        waiting = [
            actor.share_cluster_key.remote(asking.public_key)
            for lives in self.find_actors().values()
            for actor in lives.values()
            # Those that hold ports are told nothing.
            if hasattr(actor, "share_cluster_key")
        ]
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            answered, waiting = ray.wait(waiting, num_returns=1, timeout=remaining_s)
            for ref in answered:
                # It has none yet, or is of another cluster that had this name.
                with contextlib.suppress(RayError, ValueError):
                    keys = KeyPair(asking.open(ray.get(ref)))
                    keys.open(sealed)
                    return keys
        return None

    def _key(self) -> bytes:
        return self._own_namespace.encode()


def _own_actor_id() -> str | None:
    """It stays the same over all lives of an actor; None: this process is none."""
    return ray.get_runtime_context().get_actor_id()

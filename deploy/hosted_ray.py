"""The Ray that a cluster's supervisor is an actor of. What it starts outlives it, and has names in the cluster's own
namespace, by which the supervisor that Ray starts in its place finds it."""

import contextlib
import pickle
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from deploy.joined_ray import JoinedRay
from deploy.ray_module import (
    PlacementGroup,
    PlacementGroupID,
    internal_kv,
    list_named_actors,
    placement_group_table,
    ray,
    remove_placement_group,
)

SUPERVISOR = "supervisor"
_PREFIX = "tandem-"
_STATE = b"state"


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

    def save(self, state: Any) -> None:
        """Keeps what the next life of this actor begins with, for as long as Ray lives."""
        kept = pickle.dumps((_own_actor_id(), pickle.dumps(state)))
        internal_kv._internal_kv_put(_STATE, kept, overwrite=True, namespace=self._key())

    def saved(self) -> Any:
        """What an earlier life of this actor saved last; None: there is nothing, or it is another actor's: of a cluster
        of that name whose supervisor was ended before the rest of it, and which may have been configured otherwise."""
        found = internal_kv._internal_kv_get(_STATE, namespace=self._key())
        if not found:
            return None
        owner, state = pickle.loads(found)
        return pickle.loads(state) if owner == _own_actor_id() else None

    def forget(self) -> None:
        """The cluster has come to its end, and with it what it had taken of nodes."""
        for group_id, group in placement_group_table().items():
            if group["name"].startswith(self.group_name("")) and group["state"] != "REMOVED":
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
        internal_kv._internal_kv_del(_STATE, namespace=self._key())

    def _key(self) -> bytes:
        return self._own_namespace.encode()


def _own_actor_id() -> str | None:
    """It stays the same over all lives of an actor; None: this process is none."""
    return ray.get_runtime_context().get_actor_id()

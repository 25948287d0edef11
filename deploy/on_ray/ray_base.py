"""The interface of a cluster's Ray, its own or an existing one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tandem.deploy.config.node_choice import TOLERANCE
from tandem.deploy.on_ray.ray_module import ray_worker
from tandem.deploy.on_ray.ray_probe import node_is_up


class StartError(Exception):
    """Ray did not start, though the configuration is valid."""


class RayBase(ABC):
    """One per process. Does not stop a Ray that it did not start."""

    @property
    @abstractmethod
    def log_directory(self) -> str:
        """Directory of the processes' output."""

    @abstractmethod
    def start(self, num_processes: int) -> None:
        """Connects this process to Ray. Args: num_processes: routers, stores and ranks of workers to come.

        Raises:
            ValueError: this Ray is unusable.
            OSError: the host lacks a resource.
            StartError: Ray did not start.
        """

    @abstractmethod
    def stop(self) -> None:
        """Undoes `start`, also one that failed."""

    def is_up(self) -> bool:
        """Returns whether this process's Ray node runs. Does not block."""
        taken_part_in = ray_worker._global_node
        return taken_part_in is not None and node_is_up(taken_part_in.raylet_socket_name)

    @abstractmethod
    def free(self) -> dict[str, Mapping[str, float]]:
        """Returns the unused amounts of "GPU", "CPU" and others of each usable host, by node id."""

    def num_free(self, resource: str) -> int:
        """Returns the whole units that are unused on all usable hosts together."""
        return sum(int(amounts.get(resource, 0.0) + TOLERANCE) for amounts in self.free().values())

    def naming(self, name: str) -> dict[str, Any]:
        """Returns the options that name an actor; {}: the actor has no name and ends with this process."""
        return {}

    def create(self, actor_class: Any, order: Any) -> Any:
        return actor_class.remote(order)

    @abstractmethod
    def num_nodes(self) -> int:
        """Returns the number of usable hosts."""

    @abstractmethod
    def actor_options(self) -> dict[str, Any]:
        """Returns the options of every actor, without GPUs."""

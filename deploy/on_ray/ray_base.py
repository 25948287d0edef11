"""A Ray that a cluster runs on: one of its own, or one that was there before and goes on without it."""

from abc import ABC, abstractmethod
from typing import Any

from tandem.deploy.on_ray.ray_module import ray_worker
from tandem.deploy.on_ray.ray_probe import node_is_up


class StartError(Exception):
    """A Ray did not come up, though nothing is wrong with what it was asked for."""


class RayBase(ABC):
    """A process has one at a time. What it did not start it does not stop."""

    @property
    @abstractmethod
    def log_directory(self) -> str:
        """Where processes write what they print."""

    @abstractmethod
    def start(self, num_processes: int) -> None:
        """Has this process take part in Ray.

        Args:
            num_processes: that the cluster will ask it for.

        Raises:
            ValueError: it cannot be used as it is; the message says why.
            OSError: what it needs of this host cannot be had.
            StartError: it did not come up.
        """

    @abstractmethod
    def stop(self) -> None:
        """Leaves nothing behind of what start did, whether or not that came to its end."""

    def is_up(self) -> bool:
        """Whether there is a Ray of this process that could start something; looks and never waits."""
        taken_part_in = ray_worker._global_node
        return taken_part_in is not None and node_is_up(taken_part_in.raylet_socket_name)

    @abstractmethod
    def num_free(self, resource: str) -> int:
        """How much of "GPU" or "CPU" there is on this host that nobody has."""

    def naming(self, name: str) -> dict[str, Any]:
        """What a process is asked for with besides, so that it is found by this name; {}: it ends with this process."""
        return {}

    def create(self, actor_class: Any, order: Any) -> Any:
        """A process, which is told what it is to do.

        Args:
            actor_class: of Ray, made of a SealedActor.
            order: as that has it.
        """
        return actor_class.remote(order)

    @abstractmethod
    def num_nodes(self) -> int:
        """How many hosts there are whose processes could be the cluster's."""

    @abstractmethod
    def actor_options(self) -> dict[str, Any]:
        """What every process is asked for with, besides its GPUs."""

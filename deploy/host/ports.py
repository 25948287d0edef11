"""The ports of a cluster's routers, held by whoever started it for as long as the cluster lives.

So a router that is started again finds its ports free, and everybody else finds it where it was. What is held here is
bound and does not listen: no connection ever comes to it.
"""

import contextlib
import errno
import socket
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.router.config import RouterAddresses, RouterConfig, host_of, port_of


class ClientAddresses(NamedTuple):
    """Where clients find a cluster, each "host:port"."""

    grpc: str
    http: str


@dataclass(frozen=True, slots=True)
class ClusterPorts:
    """
    Attributes:
        shared: the clients' ports, at which every router listens.
        routers: each router's own, by its name. Where there is one router, the clients' ports are its own.
    """

    shared: ClientAddresses
    routers: dict[str, RouterAddresses]

    def configs(self, config: RouterConfig) -> list[RouterConfig]:
        """What each router is told, in the order of their names. Args: config: what all are told."""
        is_shared = len(self.routers) > 1
        return [
            replace(
                config,
                router_id=name,
                grpc_port=port_of(own.grpc),
                http_port=port_of(own.http),
                cluster_host=host_of(own.cluster),
                cluster_port=port_of(own.cluster),
                shared_grpc_port=port_of(self.shared.grpc) if is_shared else 0,
                shared_http_port=port_of(self.shared.http) if is_shared else 0,
                routers=self.routers,
                reuse_ports=True,
            )
            for name, own in self.routers.items()
        ]


class ReservedPorts:
    """Used as a context manager, or closed."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve_all(self, config: ClusterConfig) -> ClusterPorts:
        """Reserves all that a cluster's routers listen at.

        Raises:
            ValueError: a port is taken, or the address is not ours; the message says which field of `config` would
                help.
        """
        grpc = self.reserve(config.host, config.grpc_port, "grpc_port")
        http = self.reserve(config.host, config.http_port, "http_port")
        names = [f"router-{i}" for i in range(config.num_routers_started)]
        routers = {
            name: RouterAddresses(
                grpc if len(names) == 1 else self.reserve(config.host, 0, "grpc_port"),
                http if len(names) == 1 else self.reserve(config.host, 0, "http_port"),
                self.reserve("127.0.0.1", 0, "host"),
            )
            for name in names
        }
        return ClusterPorts(ClientAddresses(grpc, http), routers)

    def reserve(self, host: str, port: int, field: str) -> str:
        """Takes a port that nobody else has; 0 picks a free one. Returns "host:port".

        Args:
            field: where the port is configured, for the message.

        Raises:
            ValueError: as in reserve_all.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # A port that is shared could be shared with another cluster, too: first it is looked at alone. Servers bind
            # in the same way: a port whose last connections are still winding down is free.
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            held = socket.socket(family)
            self._sockets.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, port))
            address = f"{host}:{held.getsockname()[1]}"
            # Two that start at the same moment may both find it free: a name of the kernel's own can be had once alone.
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sockets.append(name)
            name.bind(f"\0tandem {address}")
        except OSError as error:
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            advice = f"choose another {field}" if is_port else "choose another `host`"
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from error
        return address

    def reserve_again(self, ports: ClusterPorts) -> None:
        """Takes what was reserved for a cluster whose routers listen there, as far as nobody else has it since."""
        for address in {*ports.shared, *(address for own in ports.routers.values() for address in own)}:
            host, _, port = address.rpartition(":")
            held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self._sockets.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with contextlib.suppress(OSError):
                held.bind((host, int(port)))

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()

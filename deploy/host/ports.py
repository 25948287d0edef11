"""Reserves the routers' ports for the life of the cluster: the launcher's sockets are bound but do not listen."""

import contextlib
import errno
import socket
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.router.config import RouterAddresses, RouterConfig, host_of, port_of


class ClientAddresses(NamedTuple):
    grpc: str
    http: str


@dataclass(frozen=True, slots=True)
class ClusterPorts:
    """
    Attributes:
        shared: client ports, at which every router listens.
        routers: each router's own addresses by name; a single router's client ports are the shared ones.
        store: address of this host's page store, if this process owns its region; else "".
    """

    shared: ClientAddresses
    routers: dict[str, RouterAddresses]
    store: str = ""

    def configs(self, config: RouterConfig) -> list[RouterConfig]:
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
    """Sockets that hold ports until `close`."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve_all(self, config: ClusterConfig) -> ClusterPorts:
        """Reserves all ports of a cluster's routers and page store.

        Raises:
            ValueError: a port is taken, or the address is not this host's; the message names the field of `config`.
        """
        grpc = self.reserve(config.host, config.grpc_port, "grpc_port")
        http = self.reserve(config.host, config.http_port, "http_port")
        names = [f"router-{i}" for i in range(config.largest.num_routers_started)]
        routers = {
            name: RouterAddresses(
                grpc if len(names) == 1 else self.reserve(config.host, 0, "grpc_port"),
                http if len(names) == 1 else self.reserve(config.host, 0, "http_port"),
                self.reserve("127.0.0.1", 0, "host"),
            )
            for name in names
        }
        store = self.reserve("127.0.0.1", 0, "host") if config.store_memory and not config.ray_address else ""
        return ClusterPorts(ClientAddresses(grpc, http), routers, store)

    def reserve(self, host: str, port: int, field: str) -> str:
        """Takes a port, or a free one for 0; returns "host:port". Raises ValueError: as for `reserve_all`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # First bind without SO_REUSEPORT, which would share another cluster's port. SO_REUSEADDR permits TIME_WAIT.
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            held = socket.socket(family)
            self._sockets.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, port))
            address = f"{host}:{held.getsockname()[1]}"
            # Two concurrent starts may both pass the probe. Only one can bind this abstract name.
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sockets.append(name)
            name.bind(f"\0tandem {address}")
        except OSError as error:
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            advice = f"choose another {field}" if is_port else "choose another `host`"
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from error
        return address

    def reserve_again(self, ports: ClusterPorts) -> None:
        """Takes a running cluster's ports again, if they are free."""
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

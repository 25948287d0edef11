"""The ports of a cluster's routers."""

import socket
import threading
from collections.abc import Iterator
from concurrent import futures

import pytest

from tandem.deploy.config.bounds import Bounds
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.ports import ReservedPorts
from tandem.router.config import RouterConfig, port_of


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    reserved = ReservedPorts()
    yield reserved
    reserved.close()


def listen(port: int, *, shared: bool) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), reuse_port=shared)


def test_a_single_router_has_the_shared_ports(ports: ReservedPorts) -> None:
    reserved = ports.reserve_all(ClusterConfig("m", grpc_port=0, http_port=0))
    (own,) = reserved.routers.values()
    assert (own.grpc, own.http) == (reserved.shared.grpc, reserved.shared.http)


def test_a_router_s_port_for_workers_is_bound_where_it_is_held(ports: ReservedPorts) -> None:
    reserved = ports.reserve_all(ClusterConfig("m", grpc_port=0, http_port=0))
    (config,) = reserved.configs(RouterConfig("model", "m", 1))
    assert (config.cluster_host, config.cluster_port) == ("127.0.0.1", port_of(reserved.routers["router-0"].cluster))


def test_several_routers_share_ports_and_have_their_own(ports: ReservedPorts) -> None:
    reserved = ports.reserve_all(ClusterConfig("m", grpc_port=0, http_port=0, num_routers=3))
    assert list(reserved.routers) == ["router-0", "router-1", "router-2"]
    addresses = [*reserved.shared, *(address for own in reserved.routers.values() for address in own)]
    assert len(set(addresses)) == 2 + 3 * 3


def test_routers_between_bounds_have_the_ports_of_the_upper_one(ports: ReservedPorts) -> None:
    config = ClusterConfig("m", grpc_port=0, http_port=0, num_routers=1, bounds={"router": Bounds(1, 3)})
    assert list(ports.reserve_all(config).routers) == ["router-0", "router-1", "router-2"]


def test_a_reserved_port_is_for_sockets_with_reuseport(ports: ReservedPorts) -> None:
    port = port_of(ports.reserve("127.0.0.1", 0, "grpc_port"))
    with pytest.raises(OSError, match="in use"):
        listen(port, shared=False)
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: .*; choose another grpc_port"):
        ReservedPorts().reserve("127.0.0.1", port, "grpc_port")
    # Two listen; one ends, and its successor listens again.
    with listen(port, shared=True):
        listen(port, shared=True).close()
        listen(port, shared=True).close()


def test_a_port_shared_by_others_is_refused(ports: ReservedPorts) -> None:
    with listen(0, shared=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match="choose another http_port"):
            ports.reserve("127.0.0.1", port, "http_port")


def test_a_held_port_accepts_no_connections(ports: ReservedPorts) -> None:
    port = port_of(ports.reserve("127.0.0.1", 0, "grpc_port"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5.0)
    with listen(port, shared=True) as server:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port), timeout=5.0):
                server.accept()[0].close()


def test_a_port_is_free_after_close(ports: ReservedPorts) -> None:
    port = port_of(ports.reserve("127.0.0.1", 0, "grpc_port"))
    ports.close()
    listen(port, shared=False).close()


def test_an_address_of_another_host_is_refused(ports: ReservedPorts) -> None:
    with pytest.raises(ValueError, match="choose another `host`"):
        ports.reserve("192.0.2.1", 0, "grpc_port")


def test_one_of_many_concurrent_starts_gets_a_port(ports: ReservedPorts) -> None:
    for _ in range(30):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        together = threading.Barrier(4)

        def reserve(port: int = port, together: threading.Barrier = together) -> ReservedPorts | None:
            mine = ReservedPorts()
            together.wait(5.0)
            try:
                mine.reserve("127.0.0.1", port, "grpc_port")
            except ValueError:
                mine.close()
                return None
            return mine

        with futures.ThreadPoolExecutor(4) as threads:
            holders = [mine for mine in threads.map(lambda _: reserve(), range(4)) if mine is not None]
        assert len(holders) <= 1
        for mine in holders:
            mine.close()

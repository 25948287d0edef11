"""gRPC channels and servers with common options."""

import resource
from collections.abc import Sequence
from typing import Any

import grpc

from tandem.hosts import is_loopback

# Holds many prompts of any length, as packed token ids.
MAX_MESSAGE_BYTES = 64 * 2**20
# Calls in flight per connection; further calls wait at the client. Exceeds the default queue limit, so that an
# overloading client gets errors before its calls wait silently.
MAX_STREAMS = 2048

# Bytes that a server reads from a connection before it parses them. By default gRPC reads as long as bytes arrive, to
# tens of MiB if a sender is fast and its frames have no flow control, and the allocator keeps that memory.
READ_BUFFER_BYTES = 64 * 2**10
# All headers of a call. gRPC refuses the call and skips the rest.
MAX_METADATA_BYTES = 16 * 2**10

# The clients' port: the server pings a silent client, then drops it.
KEEPALIVE_INTERVAL_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
# gRPC closes an idle connection with more frequent pings.
MIN_PING_INTERVAL_MS = 2_000
MAX_IDLE_MS = 300_000
# TLS handshake and HTTP/2 settings of a new connection.
HANDSHAKE_TIMEOUT_MS = 10_000
# All calls together, including waiting and refused ones. Each holds tens of kB.
MAX_CALLS = 8192

# Ports for the cluster's own processes, which have a call on every connection. A stranger holds a descriptor and some
# kilobytes until one of the timeouts.
MAX_CLUSTER_CONNECTIONS = 4096
MAX_CLUSTER_IDLE_MS = 10_000

# Keepalive between hosts, because a cut cable breaks no connection. On one host a connection ends with its process, and
# heartbeats detect a stopped one.
HOST_KEEPALIVE_INTERVAL_MS = 2_000
HOST_KEEPALIVE_TIMEOUT_MS = 3_000

_BETWEEN_HOSTS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", HOST_KEEPALIVE_INTERVAL_MS),
    # Also sets TCP_USER_TIMEOUT, which limits unacknowledged data.
    ("grpc.keepalive_timeout_ms", HOST_KEEPALIVE_TIMEOUT_MS),
    # An idle link sends only pings.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", HOST_KEEPALIVE_INTERVAL_MS // 2),
]

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # One connection per channel, so that the end of one stream does not end another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """Open a channel to another process of the cluster. Between hosts, keepalives detect an unreachable peer.

    Args:
        server_name: name that the server's certificate must carry, whatever the address.
    """
    between_hosts = [] if is_loopback(address.rpartition(":")[0]) else _BETWEEN_HOSTS
    options = [*_OPTIONS, *between_hosts, ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (), *, reuse_ports: bool = False, host: str = "127.0.0.1"
) -> grpc.aio.Server:
    """Create a server for other processes of the cluster. Its connections take at most a quarter of the descriptors
    that this process may open.

    Args:
        reuse_ports: let other sockets with this option share its ports.
        host: unless it is loopback, keepalives detect unreachable callers.
    """
    options = [
        *_server_options(reuse_ports, MAX_MESSAGE_BYTES, _max_cluster_connections()),
        *([] if is_loopback(host) else _BETWEEN_HOSTS),
        ("grpc.max_connection_idle_ms", MAX_CLUSTER_IDLE_MS),
    ]
    return grpc.aio.server(options=options, interceptors=interceptors)


def _max_cluster_connections() -> int:
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_CLUSTER_CONNECTIONS if num_files == resource.RLIM_INFINITY else min(MAX_CLUSTER_CONNECTIONS, num_files // 4)
    )


def new_client_facing_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    *,
    max_receive_bytes: int,
    max_connections: int,
    reuse_ports: bool = False,
) -> grpc.aio.Server:
    """Create a server for clients; closes connections beyond `max_connections`."""
    options = [
        *_server_options(reuse_ports, max_receive_bytes, max_connections),
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # Probing would grow a fast client's window to megabytes per call, for unread messages.
        ("grpc.http2.bdp_probe", 0),
        # By default gRPC cancels random calls beyond a thousand pending ones. Many restarting clients can cause that.
        ("grpc.server.max_pending_requests", MAX_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    ]
    return grpc.aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=MAX_CALLS)


def _server_options(reuse_ports: bool, max_receive_bytes: int, max_connections: int) -> list[tuple[str, Any]]:
    return [
        *_OPTIONS,
        ("grpc.so_reuseport", int(reuse_ports)),
        ("grpc.experimental.tcp_max_read_buffer_size", READ_BUFFER_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.settings_timeout", HANDSHAKE_TIMEOUT_MS),
    ]


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind a server and return "host:port"; port 0 picks a free port.

    Raises:
        ValueError: the port is in use, or the address is not local.
    """
    try:
        address = f"{host}:{port}"
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ValueError(f"cannot listen on {host}:{port}: the port is in use or the address is not local") from error
    return f"{host}:{bound}"

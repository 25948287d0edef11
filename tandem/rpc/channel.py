"""gRPC channels and servers with the options that every package uses."""

from collections.abc import Sequence
from typing import Any

import grpc

from tandem.hosts import is_loopback

# Prompts travel as packed token ids: 64 MiB holds more than any model's length, for many requests in one batch.
MAX_MESSAGE_BYTES = 64 * 2**20
# One connection has this many calls at once; its further ones wait at the client until others of it end. The number is
# above that of the requests that may wait for their first token by default, so that one client's overload is refused in
# words before it waits in silence.
MAX_STREAMS = 2048

# What clients may do to the clients' port. A client that has gone without a word is asked after so long, and given up
# after so long without an answer.
KEEPALIVE_INTERVAL_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
# Clients may ask in turn, this often while nothing else is said; gRPC ends the connection of one that asks more often.
MIN_PING_INTERVAL_MS = 2_000
# A connection without calls is closed; clients open a new one with their next call and notice nothing.
MAX_IDLE_MS = 300_000
# A connection must get so far as to say which HTTP/2 it speaks, after whatever TLS asks of it.
HANDSHAKE_TIMEOUT_MS = 10_000
# All calls together, those that wait or are refused included. Each keeps a few ten kB, whatever it asks for.
MAX_CALLS = 8192

# What processes of a cluster on different hosts ask each other: a cable that is cut breaks no connection. A peer that
# has said nothing for so long is asked, and one that has answered nothing for so long is given up. On one host a
# connection ends with its process, and who stands still is for others to judge.
HOST_KEEPALIVE_INTERVAL_MS = 2_000
HOST_KEEPALIVE_TIMEOUT_MS = 3_000

_BETWEEN_HOSTS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", HOST_KEEPALIVE_INTERVAL_MS),
    # It is the limit on what the kernel sends in vain, too (TCP_USER_TIMEOUT).
    ("grpc.keepalive_timeout_ms", HOST_KEEPALIVE_TIMEOUT_MS),
    # A link without requests carries nothing for as long as that lasts.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", HOST_KEEPALIVE_INTERVAL_MS // 2),
]

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Every channel has its own connection, so that one stream's end says nothing about another's.
    ("grpc.use_local_subchannel_pool", 1),
    # Traffic between workers never goes through a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
]


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """To another process of the cluster. One on another host is noticed to be out of reach.

    Args:
        address: "host:port".
        credentials: for TLS; None: plain.
        server_name: what the server's certificate must be for, whatever its address is.
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
    """For the processes of a cluster.

    Args:
        reuse_ports: whether its ports may be shared with others that allow it too. Nothing is shared by accident.
        host: where it is going to listen. Callers from other hosts are noticed to be out of reach.
    """
    options = [
        *_OPTIONS,
        *([] if is_loopback(host) else _BETWEEN_HOSTS),
        ("grpc.so_reuseport", int(reuse_ports)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.settings_timeout", HANDSHAKE_TIMEOUT_MS),
    ]
    return grpc.aio.server(options=options, interceptors=interceptors)


def new_client_facing_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    *,
    max_receive_bytes: int,
    max_connections: int,
    reuse_ports: bool = False,
) -> grpc.aio.Server:
    """For anybody.

    Args:
        max_receive_bytes: of one message; gRPC refuses a larger one with RESOURCE_EXHAUSTED.
        max_connections: further ones are closed as they come.
        reuse_ports: as for new_server.
    """
    options = [
        *_OPTIONS,
        ("grpc.so_reuseport", int(reuse_ports)),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.settings_timeout", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # A fast client's window would grow to megabytes for each of its calls, for messages that nobody reads yet. One
        # that is being read has a window of its own size anyway.
        ("grpc.http2.bdp_probe", 0),
        # gRPC cancels calls at random where more than a thousand wait to be looked at, which as many clients of a
        # restarted program bring about without meaning any harm.
        ("grpc.server.max_pending_requests", MAX_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
    ]
    return grpc.aio.server(options=options, interceptors=interceptors, maximum_concurrent_rpcs=MAX_CALLS)


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> str:
    """Binds a server; port 0 picks a free one. Returns "host:port".

    Args:
        credentials: for TLS; None: plain.

    Raises:
        ValueError: the port is taken or the address is not ours.
    """
    try:
        address = f"{host}:{port}"
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise ValueError(f"cannot listen on {host}:{port}: the port is in use or the address not ours") from error
    return f"{host}:{bound}"

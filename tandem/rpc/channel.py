"""gRPC channels and servers with the options that every package uses."""

from collections.abc import Sequence
from typing import Any

import grpc

# Prompts travel as packed token ids: 64 MiB holds more than any model's length, for many requests in one batch.
MAX_MESSAGE_BYTES = 64 * 2**20
# One connection has this many calls at once; its further ones wait at the client until others of it end. The number is
# above that of the requests that may wait for their first token by default, so that one client's overload is refused in
# words before it waits in silence.
MAX_STREAMS = 2048

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Every channel has its own connection, so that one stream's end says nothing about another's.
    ("grpc.use_local_subchannel_pool", 1),
    # Traffic between workers never goes through a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    options = [*_OPTIONS, ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    return grpc.aio.insecure_channel(address, options=options)


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
    *,
    reuse_ports: bool = False,
) -> grpc.aio.Server:
    """
    Args:
        max_receive_bytes: of one message; gRPC refuses a larger one with RESOURCE_EXHAUSTED.
        reuse_ports: whether its ports may be shared with others that allow it too. Nothing is shared by accident.
    """
    options = [
        *_OPTIONS,
        ("grpc.so_reuseport", int(reuse_ports)),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
    ]
    return grpc.aio.server(options=options, interceptors=interceptors)


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

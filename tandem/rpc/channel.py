"""gRPC channels and servers with the options that every room uses."""

from typing import Any

import grpc

# Prompts travel as packed token ids: 64 MiB holds more than any model's length, for many requests in one batch.
MAX_MESSAGE_BYTES = 64 * 2**20

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two clusters must not share a port by accident.
    ("grpc.so_reuseport", 0),
    # Every channel has its own connection, so that one stream's end says nothing about another's.
    ("grpc.use_local_subchannel_pool", 1),
    # Traffic between workers never goes through a proxy of the environment.
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def new_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_OPTIONS)


def bind(server: grpc.aio.Server, host: str, port: int) -> str:
    """Binds a server; port 0 picks a free one. Returns "host:port".

    Raises:
        ValueError: the port is taken or the address is not ours.
    """
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ValueError(f"cannot listen on {host}:{port}: the port is in use or the address not ours") from error
    return f"{host}:{bound}"

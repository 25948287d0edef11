"""Asks a Ray whether it is there, before this process takes part in it and while it does."""

import socket

import grpc

_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_TIMEOUT_S = 10.0


def call_ray(address: str, token: str = "") -> bytes:
    """Calls the Ray at an address and returns its answer, which has its version in it.

    Args:
        token: to show; "" shows none.

    Raises:
        grpc.RpcError: it does not answer, or not to us.
    """
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        answer: bytes = channel.unary_unary(_METHOD)(b"", timeout=_TIMEOUT_S, metadata=metadata)
        return answer


def node_is_up(socket_path: str) -> bool:
    """Whether somebody listens at the socket of a node of Ray's. Looks and never waits."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(socket_path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            # It has more callers than it could let in so far.
            pass
        return True

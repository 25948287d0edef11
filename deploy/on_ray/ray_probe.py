"""Probes a Ray without joining it."""

import socket

import grpc

_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_TIMEOUT_S = 10.0


def call_ray(address: str, token: str = "") -> bytes:
    """Calls a Ray; returns its answer, which contains the version. Raises grpc.RpcError: no answer, or a refusal."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        answer: bytes = channel.unary_unary(_METHOD)(b"", timeout=_TIMEOUT_S, metadata=metadata)
        return answer


def node_is_up(socket_path: str) -> bool:
    """Returns whether a Ray node listens. Does not block."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(socket_path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            # The backlog is full.
            pass
        return True

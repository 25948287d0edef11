"""A small client for a cluster's gRPC front door."""

from collections.abc import Iterator
from types import TracebackType

import grpc

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"


class TandemError(Exception):
    """A call failed.

    Attributes:
        code: the gRPC status code's name, such as "UNAVAILABLE".
    """

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details)
        self.code = code


class TandemClient:
    """Talks to one router. Use as a context manager."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> "TandemClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def generate(self, request: pb.GenerateRequest, timeout_s: float | None = None) -> Iterator[pb.GenerateResponse]:
        """Streams responses; closing the iterator aborts the request. Raises TandemError."""
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _translate(error, self.address) from error
        finally:
            call.cancel()

    def server_info(self, timeout_s: float = 5.0) -> pb.ServerInfo:
        """Raises TandemError."""
        try:
            return self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _translate(error, self.address) from error


def _translate(error: grpc.RpcError, address: str) -> TandemError:
    code, details = error.code(), error.details() or ""
    # gRPC's own words; a router that lacks a worker says so in its own.
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect"):
        details = f"no cluster answers at {address}; start one with `tandem serve`"
    return TandemError(code.name, details)

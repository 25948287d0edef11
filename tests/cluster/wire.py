"""Raw HTTP and gRPC requests, not corrected by a client library."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPMessage
from typing import Any

import grpc

from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import ServedCluster

GENERATE, EMBED = "/tandem.v1.Inference/Generate", "/tandem.v1.Inference/Embed"
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error object, which must be the only one."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json) == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def http(
    served: ServedCluster,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """Send one request. A body in parts is sent chunked."""
    connection = HTTPConnection(served.cluster.addresses.http, timeout=TIMEOUT_S)
    try:
        # The server may answer before it has the whole body.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, body, headers or {}, encode_chunked=not isinstance(body, bytes))
        response = connection.getresponse()
        return HttpAnswer(response.status, response.headers, response.read())
    finally:
        connection.close()


class RawGrpc:
    """gRPC client for raw bytes. Use as a context manager."""

    def __init__(self, address: str) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options=options)

    def __enter__(self) -> "RawGrpc":
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def generate(self, request: bytes, key: str = "") -> list[pb.GenerateResponse]:
        """Raises grpc.RpcError."""
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        call = self.channel.unary_stream(GENERATE, response_deserializer=pb.GenerateResponse.FromString)
        return list(call(request, timeout=TIMEOUT_S, metadata=metadata))

    def embed(self, request: bytes) -> list[pb.EmbedResponse]:
        """Raises grpc.RpcError."""
        call = self.channel.unary_stream(EMBED, response_deserializer=pb.EmbedResponse.FromString)
        return list(call(request, timeout=TIMEOUT_S))

    def refusal(self, request: bytes, key: str = "", *, embeds: bool = False) -> tuple[str, str]:
        """Return the status code and message of a request that must fail. Args: embeds: for the method Embed."""
        try:
            responses: Any = self.embed(request) if embeds else self.generate(request, key)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(f"served: {responses}")

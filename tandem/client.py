"""Clients for a cluster's gRPC frontend: TandemClient for threads, AsyncTandemClient for asyncio.

    with TandemClient("127.0.0.1:50051") as client:
        for response in client.chat("What is the capital of France?", max_tokens=32):
            print(response.text, end="", flush=True)

Requests and responses are the messages of `proto/tandem/v1/inference.proto`; `make_request` builds one from plain
Python values.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
_INFO_TIMEOUT_S = 5.0
_OPTIONS = [("grpc.enable_http_proxy", 0)]

# A conversation is given as text of one user message, as role-content mappings, or as protobuf messages.
Messages = str | Sequence[Mapping[str, str] | pb.ChatMessage]


class TandemError(Exception):
    """A call failed.

    Attributes:
        code: the gRPC status code's name, such as "UNAVAILABLE".
    """

    def __init__(self, code: str, details: str) -> None:
        super().__init__(details)
        self.code = code


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS to the router.

    Attributes:
        ca_file: PEM file of the authorities to trust; empty: the system's.
        cert_file, key_file: the client's own certificate and key, where the router asks for one.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError if a file cannot be read."""
        ca, cert, key = (Path(f).read_bytes() if f else None for f in (self.ca_file, self.cert_file, self.key_file))
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def make_request(
    prompt: str | Sequence[int] | None = None,
    *,
    messages: Messages | None = None,
    model: str = "",
    request_id: str = "",
    priority: int = 0,
    cache_namespace: str = "",
    session_id: str = "",
    **sampling: Any,
) -> pb.GenerateRequest:
    """Builds a request from a text, token ids or a chat; what is left out has the server's defaults.

    Args:
        sampling: fields of SamplingParams, such as max_tokens, temperature, seed, stop.

    Raises:
        ValueError: neither or both of `prompt` and `messages` are given, or a sampling field does not exist.
    """
    if (prompt is None) == (messages is None):
        raise ValueError("exactly one of prompt and messages is needed")
    request = pb.GenerateRequest(
        request_id=request_id,
        model=model,
        priority=priority,
        cache_namespace=cache_namespace,
        session_id=session_id,
        sampling=pb.SamplingParams(**sampling),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    elif isinstance(messages, str):
        request.chat.messages.add(role="user", content=messages)
    else:
        for message in messages or ():
            proto = message if isinstance(message, pb.ChatMessage) else pb.ChatMessage(**message)
            request.chat.messages.append(proto)
        request.chat.SetInParent()
    return request


class TandemClient:
    """Talks to one router; safe to use from several threads. Use as a context manager, or close it."""

    def __init__(self, address: str = DEFAULT_ADDRESS, api_key: str = "", tls: ClientTls | None = None) -> None:
        """
        Args:
            address: "host:port" of the router's gRPC port.
            api_key: sent with every call if not empty.
            tls: None: a plain connection.
        """
        self.address = address
        self._metadata = _metadata(api_key)
        self._channel = (
            grpc.secure_channel(address, tls.credentials(), options=_OPTIONS)
            if tls
            else grpc.insecure_channel(address, options=_OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> "TandemClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls."""
        self._channel.close()

    def generate(self, request: pb.GenerateRequest, timeout_s: float | None = None) -> Iterator[pb.GenerateResponse]:
        """Streams responses; closing the iterator aborts the request. Raises TandemError."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _translate(error, self.address) from error
        finally:
            call.cancel()

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Iterator[pb.GenerateResponse]:
        """Continues a text or token ids; `options` are those of `make_request`. Raises TandemError, ValueError."""
        return self.generate(make_request(prompt, **options))

    def chat(self, messages: Messages, **options: Any) -> Iterator[pb.GenerateResponse]:
        """Answers a conversation; `options` are those of `make_request`. Raises TandemError, ValueError."""
        return self.generate(make_request(messages=messages, **options))

    def server_info(self, timeout_s: float = _INFO_TIMEOUT_S) -> pb.ServerInfo:
        """Raises TandemError."""
        try:
            return self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _translate(error, self.address) from error


class AsyncTandemClient:
    """Talks to one router from one asyncio loop. Use as an async context manager, or close it."""

    def __init__(self, address: str = DEFAULT_ADDRESS, api_key: str = "", tls: ClientTls | None = None) -> None:
        """Args: as TandemClient's."""
        self.address = address
        self._metadata = _metadata(api_key)
        self._channel = (
            grpc.aio.secure_channel(address, tls.credentials(), options=_OPTIONS)
            if tls
            else grpc.aio.insecure_channel(address, options=_OPTIONS)
        )
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> "AsyncTandemClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls."""
        await self._channel.close()

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams responses; closing the iterator aborts the request. Raises TandemError."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise _translate(error, self.address) from error
        finally:
            call.cancel()

    def complete(self, prompt: str | Sequence[int], **options: Any) -> AsyncIterator[pb.GenerateResponse]:
        """As TandemClient.complete."""
        return self.generate(make_request(prompt, **options))

    def chat(self, messages: Messages, **options: Any) -> AsyncIterator[pb.GenerateResponse]:
        """As TandemClient.chat."""
        return self.generate(make_request(messages=messages, **options))

    async def server_info(self, timeout_s: float = _INFO_TIMEOUT_S) -> pb.ServerInfo:
        """Raises TandemError."""
        try:
            return await self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _translate(error, self.address) from error


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _translate(error: Any, address: str) -> TandemError:
    code, details = error.code(), error.details() or ""
    # These are gRPC's own words, for a port where nobody answers; a router that lacks a worker says so in other words.
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith("failed to connect"):
        details = f"no cluster answers at {address}; start one with `tandem serve`, or see to TLS if it asks for it"
    return TandemError(code.name, details)

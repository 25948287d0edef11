"""The synchronous and the asyncio client. `StreamProgress` and `RouterTargets` hold their common logic."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc

from tandem.client.progress import RETRY_DELAY_S, EmbedProgress, StreamProgress
from tandem.client.requests import (
    DEFAULT_ADDRESS,
    ClientTls,
    EmbedInputs,
    Messages,
    TandemError,
    make_embed_request,
    make_request,
    metadata,
    translate,
)
from tandem.client.targets import RouterTargets
from tandem.v1 import adapters_pb2 as adapters
from tandem.v1 import adapters_pb2_grpc, inference_pb2_grpc, recording_pb2_grpc
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import recording_pb2 as recording

_INFO_TIMEOUT_S = 5.0
# A worker reads all of an adapter before it is served.
_LOAD_TIMEOUT_S = 150.0
# Time to collect a recording after its end.
_COLLECT_TIMEOUT_S = 90.0
# Initial wait for routers to answer at their own ports; later ones join later.
_REACH_TIMEOUT_S = 1.0
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # Keepalive during calls, because a cut cable breaks no connection.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_Channel = TypeVar("_Channel", grpc.Channel, grpc.aio.Channel)


class _Client(Generic[_Channel]):
    # grpc or grpc.aio.
    _rpc: Any

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        api_key: str = "",
        tls: ClientTls | None = None,
        *,
        one_router: bool = False,
    ) -> None:
        """
        Args:
            address: "host:port" of the cluster's gRPC port, or of one router's own.
            api_key: sent with every call if not empty.
            tls: None for plain text.
            one_router: call only the router at `address`, without failover.
        """
        self.address = address
        self._metadata = metadata(api_key)
        self._credentials = tls.credentials() if tls else None
        self._one_router = one_router
        self._targets = RouterTargets(address)
        self._channels: dict[str, _Channel] = {address: self._open(address)}
        self._prepare()

    def _prepare(self) -> None:
        """Create the subclass's state."""
        raise NotImplementedError

    def _open(self, address: str) -> _Channel:
        if self._credentials is None:
            channel: _Channel = self._rpc.insecure_channel(address, options=_OPTIONS)
        else:
            channel = self._rpc.secure_channel(address, self._credentials, options=_OPTIONS)
        return channel


class TandemClient(_Client[grpc.Channel]):
    """A thread-safe client of a cluster. Use as a context manager, or close it."""

    _rpc = grpc

    def _prepare(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> "TandemClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for channel in self._channels.values():
                channel.close()

    def generate(self, request: pb.GenerateRequest, timeout_s: float | None = None) -> Generator[pb.GenerateResponse]:
        """Stream responses; closing the iterator aborts the request. Raises TandemError."""
        progress = StreamProgress(request, timeout_s)
        while True:
            address, channel = self._next_channel(request.session_id, progress.time_left())
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(progress.next_request(), timeout=progress.time_left(), metadata=self._metadata)
            try:
                for response in call:
                    progress.add(response)
                    yield response
                return
            except grpc.RpcError as error:
                if not (self._targets.is_known and progress.goes_on_after(error)):
                    raise translate(error, self.address) from error
                self._targets.avoid(address)
            finally:
                call.cancel()
            time.sleep(RETRY_DELAY_S)

    def complete(self, prompt: str | Sequence[int], **options: Any) -> Generator[pb.GenerateResponse]:
        """Continue a text or token ids. Args: options: of `make_request`. Raises TandemError, ValueError."""
        return self.generate(make_request(prompt, **options))

    def chat(self, messages: Messages, **options: Any) -> Generator[pb.GenerateResponse]:
        """Answer a conversation. Args: options: of `make_request`. Raises TandemError, ValueError."""
        return self.generate(make_request(messages=messages, **options))

    def embed(self, inputs: EmbedInputs, *, timeout_s: float | None = None, **options: Any) -> list[pb.EmbedResponse]:
        """Embed one or several texts or lists of token ids; `values` of each response is the embedding.

        Args: options: of `make_embed_request`.

        Returns: one response for each input, in their order.

        Raises TandemError.
        """
        progress = EmbedProgress(make_embed_request(inputs, **options), timeout_s)
        while True:
            address, channel = self._next_channel("", progress.time_left())
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Embed(progress.next_request(), timeout=progress.time_left(), metadata=self._metadata)
            try:
                for response in call:
                    progress.add(response)
                return progress.responses
            except grpc.RpcError as error:
                if not (self._targets.is_known and progress.goes_on_after(error)):
                    raise translate(error, self.address) from error
                self._targets.avoid(address)
            finally:
                call.cancel()
            time.sleep(RETRY_DELAY_S)

    def server_info(self, timeout_s: float = _INFO_TIMEOUT_S) -> pb.ServerInfo:
        """Ask the router at `address`. Raises TandemError."""
        stub = inference_pb2_grpc.InferenceStub(self._channels[self.address])
        try:
            return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error

    def load_adapter(
        self, name: str, path: str, *, in_place: bool = False, timeout_s: float = _LOAD_TIMEOUT_S
    ) -> pb.LoadedAdapter:
        """Have the cluster serve a LoRA adapter; `api_key` must be an admin key. Raises TandemError.

        Args:
            name: model name of its requests.
            path: PEFT directory below the server's --lora-root.
            in_place: replace another content of this name.
        """
        stub = adapters_pb2_grpc.AdapterAdminStub(self._channels[self.address])
        request = adapters.LoadAdapterRequest(name=name, path=path, in_place=in_place)
        try:
            return stub.LoadAdapter(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error

    def unload_adapter(self, name: str, timeout_s: float = _INFO_TIMEOUT_S) -> None:
        """Unload an adapter; its running requests end normally. Raises TandemError."""
        stub = adapters_pb2_grpc.AdapterAdminStub(self._channels[self.address])
        try:
            stub.UnloadAdapter(adapters.UnloadAdapterRequest(name=name), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error

    def list_adapters(self, timeout_s: float = _INFO_TIMEOUT_S) -> list[pb.LoadedAdapter]:
        """Return the adapters that requests can name. Raises TandemError."""
        stub = adapters_pb2_grpc.AdapterAdminStub(self._channels[self.address])
        try:
            found = stub.ListAdapters(adapters.ListAdaptersRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error
        return list(found.adapters)

    def record(self, duration_s: float) -> Generator[recording.RecordedPart]:
        """Record all processes of the cluster for `duration_s`, then stream the recording.

        Closing the iterator ends the recording. Raises TandemError.
        """
        stub = recording_pb2_grpc.TracingStub(self._channels[self.address])
        request = recording.RecordRequest(duration_s=duration_s)
        call = stub.Record(request, timeout=duration_s + _COLLECT_TIMEOUT_S, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise translate(error, self.address) from error
        finally:
            call.cancel()

    def _next_channel(self, session_id: str, time_left: float | None) -> tuple[str, grpc.Channel]:
        if self._one_router:
            return self.address, self._channels[self.address]
        with self._lock:
            if self._targets.must_ask:
                self._ask(_info_timeout(time_left))
            address = self._targets.next(session_id)
            return address, self._channels[address]

    def _ask(self, timeout_s: float) -> None:
        try:
            info = self.server_info(timeout_s)
        except TandemError:
            # The next call will report the error.
            self._targets.mark_unanswered()
            return
        addresses = self._targets.set_routers([router.grpc_address for router in info.routers])
        for gone in self._channels.keys() - {self.address, *addresses}:
            self._channels.pop(gone).close()
        connecting = []
        for address in addresses:
            if address not in self._channels:
                self._channels[address] = self._open(address)
            ready = grpc.channel_ready_future(self._channels[address])
            # A busy router is used once it answers.
            ready.add_done_callback(lambda _, address=address: self._targets.mark_reached(address))
            connecting.append(ready)
        deadline = time.monotonic() + min(timeout_s, _REACH_TIMEOUT_S)
        for ready in connecting:
            with contextlib.suppress(grpc.FutureTimeoutError):
                ready.result(max(0.0, deadline - time.monotonic()))


class AsyncTandemClient(_Client[grpc.aio.Channel]):
    """TandemClient for one asyncio loop. Use as an async context manager, or close it."""

    _rpc = grpc.aio

    def _prepare(self) -> None:
        self._lock = asyncio.Lock()
        self._connecting: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "AsyncTandemClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        for channel in self._channels.values():
            await channel.close()

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        progress = StreamProgress(request, timeout_s)
        while True:
            address, channel = await self._next_channel(request.session_id, progress.time_left())
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(progress.next_request(), timeout=progress.time_left(), metadata=self._metadata)
            try:
                async for response in call:
                    progress.add(response)
                    yield response
                return
            except grpc.RpcError as error:
                if not (self._targets.is_known and progress.goes_on_after(error)):
                    raise translate(error, self.address) from error
                self._targets.avoid(address)
            finally:
                call.cancel()
            await asyncio.sleep(RETRY_DELAY_S)

    def complete(self, prompt: str | Sequence[int], **options: Any) -> AsyncIterator[pb.GenerateResponse]:
        return self.generate(make_request(prompt, **options))

    def chat(self, messages: Messages, **options: Any) -> AsyncIterator[pb.GenerateResponse]:
        return self.generate(make_request(messages=messages, **options))

    async def embed(
        self, inputs: EmbedInputs, *, timeout_s: float | None = None, **options: Any
    ) -> list[pb.EmbedResponse]:
        progress = EmbedProgress(make_embed_request(inputs, **options), timeout_s)
        while True:
            address, channel = await self._next_channel("", progress.time_left())
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Embed(progress.next_request(), timeout=progress.time_left(), metadata=self._metadata)
            try:
                async for response in call:
                    progress.add(response)
                return progress.responses
            except grpc.RpcError as error:
                if not (self._targets.is_known and progress.goes_on_after(error)):
                    raise translate(error, self.address) from error
                self._targets.avoid(address)
            finally:
                call.cancel()
            await asyncio.sleep(RETRY_DELAY_S)

    async def server_info(self, timeout_s: float = _INFO_TIMEOUT_S) -> pb.ServerInfo:
        stub: Any = inference_pb2_grpc.InferenceStub(self._channels[self.address])
        try:
            return await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error

    async def load_adapter(
        self, name: str, path: str, *, in_place: bool = False, timeout_s: float = _LOAD_TIMEOUT_S
    ) -> pb.LoadedAdapter:
        stub: Any = adapters_pb2_grpc.AdapterAdminStub(self._channels[self.address])
        request = adapters.LoadAdapterRequest(name=name, path=path, in_place=in_place)
        try:
            return await stub.LoadAdapter(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error

    async def unload_adapter(self, name: str, timeout_s: float = _INFO_TIMEOUT_S) -> None:
        stub: Any = adapters_pb2_grpc.AdapterAdminStub(self._channels[self.address])
        request = adapters.UnloadAdapterRequest(name=name)
        try:
            await stub.UnloadAdapter(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error

    async def list_adapters(self, timeout_s: float = _INFO_TIMEOUT_S) -> list[pb.LoadedAdapter]:
        stub: Any = adapters_pb2_grpc.AdapterAdminStub(self._channels[self.address])
        try:
            found = await stub.ListAdapters(adapters.ListAdaptersRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error
        return list(found.adapters)

    async def record(self, duration_s: float) -> AsyncIterator[recording.RecordedPart]:
        stub: Any = recording_pb2_grpc.TracingStub(self._channels[self.address])
        request = recording.RecordRequest(duration_s=duration_s)
        call = stub.Record(request, timeout=duration_s + _COLLECT_TIMEOUT_S, metadata=self._metadata)
        try:
            async for part in call:
                yield part
        except grpc.RpcError as error:
            raise translate(error, self.address) from error
        finally:
            call.cancel()

    async def _next_channel(self, session_id: str, time_left: float | None) -> tuple[str, grpc.aio.Channel]:
        if self._one_router:
            return self.address, self._channels[self.address]
        async with self._lock:
            if self._targets.must_ask:
                await self._ask(_info_timeout(time_left))
            address = self._targets.next(session_id)
            return address, self._channels[address]

    async def _ask(self, timeout_s: float) -> None:
        try:
            info = await self.server_info(timeout_s)
        except TandemError:
            # The next call will report the error.
            self._targets.mark_unanswered()
            return
        addresses = self._targets.set_routers([router.grpc_address for router in info.routers])
        for gone in self._channels.keys() - {self.address, *addresses}:
            await self._channels.pop(gone).close()
        for address in addresses:
            if address not in self._channels:
                self._channels[address] = self._open(address)
            # A busy router is used once it answers.
            self._connecting.add(asyncio.create_task(self._connect(address)))
        await asyncio.wait(self._connecting, timeout=min(timeout_s, _REACH_TIMEOUT_S))
        self._connecting = {task for task in self._connecting if not task.done()}

    async def _connect(self, address: str) -> None:
        await self._channels[address].channel_ready()
        self._targets.mark_reached(address)


def _info_timeout(time_left: float | None) -> float:
    return _INFO_TIMEOUT_S if time_left is None else min(time_left, _INFO_TIMEOUT_S)

"""The two clients. What is alike in both is in `StreamProgress` and `RouterTargets`, which know no sockets."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc

from tandem.client.progress import RETRY_DELAY_S, StreamProgress
from tandem.client.requests import DEFAULT_ADDRESS, ClientTls, Messages, TandemError, make_request, metadata, translate
from tandem.client.targets import RouterTargets
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc, recording_pb2_grpc
from tandem.v1 import recording_pb2 as recording

_INFO_TIMEOUT_S = 5.0
# A recording has come so long after its end, or is given up.
_COLLECT_TIMEOUT_S = 90.0
# So long is waited at first for routers to answer at their own ports; those that answer later are used later.
_REACH_TIMEOUT_S = 1.0
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # While a call is under way a router that has said nothing for 5 s is asked, and given up after 5 more: a cable that
    # is cut ends no connection.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_Channel = TypeVar("_Channel", grpc.Channel, grpc.aio.Channel)


class _Client(Generic[_Channel]):
    """What both clients have: whom they talk to, as whom, and a channel to each router."""

    # The module that opens channels of their kind.
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
            tls: None: a plain connection.
            one_router: stay with whichever router answers at that address, and do not go on elsewhere when it dies.
        """
        self.address = address
        self._metadata = metadata(api_key)
        self._credentials = tls.credentials() if tls else None
        self._one_router = one_router
        self._targets = RouterTargets(address)
        # The first is to `address`; others are opened when they are needed.
        self._channels: dict[str, _Channel] = {address: self._open(address)}
        self._prepare()

    def _prepare(self) -> None:
        """Makes what a client has besides."""
        raise NotImplementedError

    def _open(self, address: str) -> _Channel:
        if self._credentials is None:
            channel: _Channel = self._rpc.insecure_channel(address, options=_OPTIONS)
        else:
            channel = self._rpc.secure_channel(address, self._credentials, options=_OPTIONS)
        return channel


class TandemClient(_Client[grpc.Channel]):
    """Talks to a cluster; safe to use from several threads. Use as a context manager, or close it."""

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
        """Ends all calls."""
        with self._lock:
            for channel in self._channels.values():
                channel.close()

    def generate(self, request: pb.GenerateRequest, timeout_s: float | None = None) -> Generator[pb.GenerateResponse]:
        """Streams responses; closing the iterator aborts the request. Raises TandemError."""
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
        """Continues a text or token ids; `options` are those of `make_request`. Raises TandemError, ValueError."""
        return self.generate(make_request(prompt, **options))

    def chat(self, messages: Messages, **options: Any) -> Generator[pb.GenerateResponse]:
        """Answers a conversation; `options` are those of `make_request`. Raises TandemError, ValueError."""
        return self.generate(make_request(messages=messages, **options))

    def server_info(self, timeout_s: float = _INFO_TIMEOUT_S) -> pb.ServerInfo:
        """Asks whichever router answers at `address`. Raises TandemError."""
        stub = inference_pb2_grpc.InferenceStub(self._channels[self.address])
        try:
            return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error

    def record(self, duration_s: float) -> Generator[recording.RecordedPart]:
        """Has the whole cluster record what it does for so many seconds, and gives that part by part; closing the
        iterator ends the recording. Raises TandemError."""
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
        """Where the next call goes. Args: time_left: in seconds, for the call; None: as long as it takes."""
        if self._one_router:
            return self.address, self._channels[self.address]
        with self._lock:
            if self._targets.must_ask:
                self._ask(_info_timeout(time_left))
            address = self._targets.next(session_id)
            return address, self._channels[address]

    def _ask(self, timeout_s: float) -> None:
        """Finds out which routers there are, and connects to them."""
        try:
            info = self.server_info(timeout_s)
        except TandemError:
            # The call that is to be made will say what is wrong.
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
            # A router that is busy is used from when it answers on.
            ready.add_done_callback(lambda _, address=address: self._targets.mark_reached(address))
            connecting.append(ready)
        deadline = time.monotonic() + min(timeout_s, _REACH_TIMEOUT_S)
        for ready in connecting:
            with contextlib.suppress(grpc.FutureTimeoutError):
                ready.result(max(0.0, deadline - time.monotonic()))


class AsyncTandemClient(_Client[grpc.aio.Channel]):
    """Talks to a cluster from one asyncio loop. Use as an async context manager, or close it."""

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
        """Ends all calls."""
        for task in self._connecting:
            task.cancel()
        for channel in self._channels.values():
            await channel.close()

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams responses; closing the iterator aborts the request. Raises TandemError."""
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
        """As TandemClient.complete."""
        return self.generate(make_request(prompt, **options))

    def chat(self, messages: Messages, **options: Any) -> AsyncIterator[pb.GenerateResponse]:
        """As TandemClient.chat."""
        return self.generate(make_request(messages=messages, **options))

    async def server_info(self, timeout_s: float = _INFO_TIMEOUT_S) -> pb.ServerInfo:
        """Asks whichever router answers at `address`. Raises TandemError."""
        stub: Any = inference_pb2_grpc.InferenceStub(self._channels[self.address])
        try:
            return await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self.address) from error

    async def record(self, duration_s: float) -> AsyncIterator[recording.RecordedPart]:
        """As TandemClient.record."""
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
        """Where the next call goes. Args: time_left: in seconds, for the call; None: as long as it takes."""
        if self._one_router:
            return self.address, self._channels[self.address]
        async with self._lock:
            if self._targets.must_ask:
                await self._ask(_info_timeout(time_left))
            address = self._targets.next(session_id)
            return address, self._channels[address]

    async def _ask(self, timeout_s: float) -> None:
        """Finds out which routers there are, and connects to them."""
        try:
            info = await self.server_info(timeout_s)
        except TandemError:
            # The call that is to be made will say what is wrong.
            self._targets.mark_unanswered()
            return
        addresses = self._targets.set_routers([router.grpc_address for router in info.routers])
        for gone in self._channels.keys() - {self.address, *addresses}:
            await self._channels.pop(gone).close()
        for address in addresses:
            if address not in self._channels:
                self._channels[address] = self._open(address)
            # A router that is busy is used from when it answers on.
            self._connecting.add(asyncio.create_task(self._connect(address)))
        await asyncio.wait(self._connecting, timeout=min(timeout_s, _REACH_TIMEOUT_S))
        self._connecting = {task for task in self._connecting if not task.done()}

    async def _connect(self, address: str) -> None:
        await self._channels[address].channel_ready()
        self._targets.mark_reached(address)


def _info_timeout(time_left: float | None) -> float:
    """How long to ask for, in seconds, on the way to a call that has so long."""
    return _INFO_TIMEOUT_S if time_left is None else min(time_left, _INFO_TIMEOUT_S)

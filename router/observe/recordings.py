"""Recordings of the whole cluster. Each process records itself, and the asked router collects the parts."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc

from tandem.router.errors import InvalidRequestError, OverloadedError
from tandem.router.requests.clock_offsets import ClockOffsets
from tandem.router.workers.worker import Worker
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.recording_service import MAX_DURATION_S, STOP_TIMEOUT_S, duration_refusal
from tandem.v1 import recording_pb2 as pb
from tandem.v1 import recording_pb2_grpc

START_TIMEOUT_S = 5.0
# Seconds for the client to take all parts after the recording.
COLLECT_TIMEOUT_S = 60.0
# A process reports its result or its failure within STOP_TIMEOUT_S and a little. A longer silence means a stopped
# process, and the other parts wait behind its own.
FIRST_PART_TIMEOUT_S = STOP_TIMEOUT_S + 5.0
NEXT_PART_TIMEOUT_S = 5.0
ROUTER = "router"
REFUSAL = "another recording is being made; try again when it has ended"


class Recordings:
    def __init__(
        self,
        routers: Mapping[str, str],
        workers: Callable[[], Iterable[Worker]],
        clocks: ClockOffsets,
        credentials: ClusterCredentials,
    ) -> None:
        self._routers = routers
        self._workers = workers
        self._clocks = clocks
        self._credentials = credentials
        self._is_recording = False

    async def record(self, duration_s: float) -> AsyncGenerator[pb.RecordedPart, None]:
        """Yields the parts of all processes in turn. A part with `failure` stands for a missing one. Closing the
        generator ends the recording.

        Raises:
            InvalidRequestError: the duration is too long or not positive.
            OverloadedError: another recording is running.
        """
        if not 0 < duration_s <= MAX_DURATION_S:
            raise InvalidRequestError(duration_refusal(duration_s), "duration_s")
        if self._is_recording:
            raise OverloadedError(REFUSAL)
        self._is_recording = True
        try:
            async with aclosing(self._parts(duration_s)) as parts:
                async for part in parts:
                    yield self._with_clock(part)
        finally:
            self._is_recording = False

    async def _parts(self, duration_s: float) -> AsyncGenerator[pb.RecordedPart, None]:
        processes = [_Process(worker.worker_id, worker.role, worker.hello.address) for worker in self._workers()]
        processes += [_Process(name, ROUTER, address) for name, address in self._routers.items()]
        async with AsyncExitStack() as channels:
            for process in processes:
                channel = await channels.enter_async_context(self._credentials.open_channel(process.address))
                process.call(channel, duration_s, self._credentials.metadata)
            for part in await asyncio.gather(*(process.begin() for process in processes)):
                yield part
            due = asyncio.get_running_loop().time() + duration_s + FIRST_PART_TIMEOUT_S
            for process in processes:
                async for part in process.parts(due):
                    yield part

    def _with_clock(self, part: pb.RecordedPart) -> pb.RecordedPart:
        if self._clocks.uncertainty_ns(part.process) is not None:
            part.clock_offset_ns = self._clocks.offset_ns(part.process)
        return part


class _Process:
    def __init__(self, name: str, role: str, address: str) -> None:
        self._name = name
        self._role = role
        self.address = address
        self._call: Any = None

    def call(self, channel: grpc.aio.Channel, duration_s: float, metadata: tuple[tuple[str, str], ...]) -> None:
        stub: Any = recording_pb2_grpc.RecordingStub(channel)
        request = pb.RecordRequest(duration_s=duration_s)
        self._call = stub.RecordProcess(request, metadata=metadata, timeout=duration_s + COLLECT_TIMEOUT_S)

    async def begin(self) -> pb.RecordedPart:
        """Raises OverloadedError if the process makes another recording."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await self._call.read()
        except TimeoutError:
            return self._failed(f"did not start within {START_TIMEOUT_S:g} s")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise OverloadedError(REFUSAL) from error
            return self._failed(f"did not start: {error.details()}")

    async def parts(self, due: float) -> AsyncIterator[pb.RecordedPart]:
        """Args: due: deadline of the first part, on the event loop's clock."""
        if self._call is None:
            return
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout_at(max(due, loop.time() + NEXT_PART_TIMEOUT_S)):
                    part = await self._call.read()
                if part is grpc.aio.EOF:
                    return
                yield part
        except TimeoutError:
            yield self._failed("sent no data in time")
        except grpc.aio.AioRpcError as error:
            yield self._failed(f"broke off: {error.details()}")

    def _failed(self, reason: str) -> pb.RecordedPart:
        self._call = None
        return pb.RecordedPart(process=self._name, role=self._role, failure=reason)

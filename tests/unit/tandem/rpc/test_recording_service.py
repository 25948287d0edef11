"""One process's part of a recording, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tandem.recording import Recorder, Recording
from tandem.rpc import recording_service
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.rpc.recording_service import SLICES_PER_PART, RecordingService
from tandem.v1 import recording_pb2 as pb
from tandem.v1 import recording_pb2_grpc
from tests.fakes.link_ends import wait_until


class Process:
    """Attributes: answers: its loop returns the recording."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.answers = True

    def stop(self, reply: Callable[[Recording], None]) -> None:
        recording = self.recorder.stop()
        if self.answers:
            reply(recording)


@asynccontextmanager
async def served(process: Process, slices_per_part: int = SLICES_PER_PART) -> AsyncIterator[Any]:
    server = new_server()
    service = RecordingService("prefill-0", "prefill", process.recorder.start, process.stop, slices_per_part)
    service.add_to(server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with open_channel(address) as channel:
            yield recording_pb2_grpc.RecordingStub(channel)
    finally:
        await server.stop(0)


def run(scenario: Callable[[Any, Process], Any]) -> None:
    async def with_deadline() -> None:
        process = Process()
        async with asyncio.timeout(20.0), served(process) as stub:
            await scenario(stub, process)

    asyncio.run(with_deadline())


def test_reports_recorded_and_dropped_slices() -> None:
    async def record(stub: Any, process: Process) -> None:
        call = stub.RecordProcess(pb.RecordRequest(duration_s=0.05))
        first = await anext(aiter(call))
        assert (first.process, first.role, process.recorder.is_on) == ("prefill-0", "prefill", True)
        for number in range(SLICES_PER_PART + 1):
            process.recorder.add("track", "name", number + 1, ("a",), end_ns=number + 3, numbers={"n": number})
        parts = [part async for part in call]
        slices = [kept for part in parts for kept in part.slices]
        assert [kept.numbers["n"] for kept in slices] == list(range(SLICES_PER_PART + 1))
        assert (slices[0].start_ns, slices[0].duration_ns, list(slices[0].request_ids)) == (1, 2, ["a"])
        assert max(len(part.slices) for part in parts) == SLICES_PER_PART
        assert (parts[-1].num_dropped, process.recorder.is_on) == (0, False)

    run(record)


def test_slices_beyond_the_byte_limit_count_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_service, "MAX_BYTES", 30_000)

    async def record(stub: Any, process: Process) -> None:
        call = stub.RecordProcess(pb.RecordRequest(duration_s=0.05))
        await anext(aiter(call))
        for number in range(3 * SLICES_PER_PART):
            process.recorder.add("track", "x" * 100, number + 1)
        parts = [part async for part in call]
        assert [len(part.slices) for part in parts] == [SLICES_PER_PART, 0]
        assert parts[-1].num_dropped == 2 * SLICES_PER_PART

    run(record)


def test_large_slices_are_sent_a_few_at_a_time() -> None:
    async def record() -> None:
        process = Process()
        async with asyncio.timeout(20.0), served(process, 3) as stub:
            call = stub.RecordProcess(pb.RecordRequest(duration_s=0.05))
            await anext(aiter(call))
            for number in range(7):
                process.recorder.add("track", "name", number + 1)
            assert [len(part.slices) async for part in call] == [3, 3, 1, 0]

    asyncio.run(record())


def test_one_recording_at_a_time_with_a_time_limit() -> None:
    async def record(stub: Any, process: Process) -> None:
        first = stub.RecordProcess(pb.RecordRequest(duration_s=10.0))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.RecordProcess(pb.RecordRequest(duration_s=1.0)).read()
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # A leaving client ends its recording.
        first.cancel()
        await wait_until(lambda: not process.recorder.is_on)
        next_one = stub.RecordProcess(pb.RecordRequest(duration_s=0.01))
        assert [part.process async for part in next_one] == ["prefill-0"] * 2
        for duration_s in (0.0, -1.0, 60.5, float("nan")):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stub.RecordProcess(pb.RecordRequest(duration_s=duration_s)).read()
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(record)


def test_unresponsive_loop_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_service, "STOP_TIMEOUT_S", 0.1)

    async def record(stub: Any, process: Process) -> None:
        process.answers = False
        parts = [part async for part in stub.RecordProcess(pb.RecordRequest(duration_s=0.01))]
        assert parts[-1].failure == "its loop did not answer within 0.1 s"

    run(record)

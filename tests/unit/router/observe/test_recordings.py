import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tandem.messages import ClockReply
from tandem.recording import Recorder, Recording
from tandem.router.errors import InvalidRequestError, OverloadedError
from tandem.router.observe import recordings as recordings_module
from tandem.router.observe.recordings import Recordings
from tandem.router.requests.clock_offsets import ClockOffsets
from tandem.router.workers.worker import Worker
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.recording_service import RecordingService
from tandem.v1 import recording_pb2 as pb
from tests.fakes.link_ends import wait_until
from tests.fakes.scripted_worker import hello

TOKEN = "the-token"


class Process:
    def __init__(self, name: str, role: str) -> None:
        self.name, self.role = name, role
        self.recorder = Recorder()
        self.address = ""
        self.answers = True
        self.server: grpc.aio.Server | None = None

    async def serve(self) -> None:
        self.server = new_server([cluster_auth(TOKEN)])
        RecordingService(self.name, self.role, self.recorder.start, self._stop_recording).add_to(self.server)
        self.address = bind(self.server, "127.0.0.1", 0)
        await self.server.start()

    def _stop_recording(self, reply: Callable[[Recording], None]) -> None:
        recording = self.recorder.stop()
        if self.answers:
            reply(recording)

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop(0)

    def as_worker(self) -> Worker:
        greeting = replace(hello(self.name, self.role), address=self.address)
        return Worker(greeting, lambda _: None, lambda _: None, last_heard=0.0, last_progress=0.0)


class Cluster:
    def __init__(self) -> None:
        self.router = Process("router-0", "router")
        self.workers = [Process("prefill-0", "prefill"), Process("decode-0", "decode")]
        self.processes = [*self.workers, self.router]
        self.clocks = ClockOffsets(lambda: 1000)

    def recordings(self) -> Recordings:
        return Recordings(
            {"router-0": self.router.address},
            lambda: [worker.as_worker() for worker in self.workers],
            self.clocks,
            ClusterCredentials(TOKEN),
        )

    @property
    def is_recording(self) -> list[bool]:
        return [process.recorder.is_on for process in self.processes]


def run(scenario: Callable[[Cluster], Any]) -> None:
    async def with_deadline() -> None:
        async with asyncio.timeout(20.0), AsyncExitStack() as stack:
            cluster = Cluster()
            for process in cluster.processes:
                await process.serve()
                stack.push_async_callback(process.stop)
            await scenario(cluster)

    asyncio.run(with_deadline())


def collected(parts: list[pb.RecordedPart]) -> dict[str, list[str]]:
    slices: dict[str, list[str]] = {}
    for part in parts:
        slices.setdefault(part.process, []).extend(kept.name for kept in part.slices)
    return slices


def test_processes_record_concurrently() -> None:
    async def scenario(cluster: Cluster) -> None:
        parts: list[pb.RecordedPart] = []
        async for part in cluster.recordings().record(0.2):
            if not parts:
                assert cluster.is_recording == [True] * 3
                for process in cluster.processes:
                    process.recorder.add("track", process.name, 1)
            parts.append(part)
        assert collected(parts) == {name: [name] for name in ("prefill-0", "decode-0", "router-0")}
        assert [part.failure for part in parts if part.failure] == []
        assert cluster.is_recording == [False] * 3

    run(scenario)


def test_clock_offset_is_reported() -> None:
    async def scenario(cluster: Cluster) -> None:
        # Its clock shows 7000 at the router's 1000.
        cluster.clocks.receive("decode-0", ClockReply(sent_ns=1000, received_ns=7000, replied_ns=7000))
        parts = [part async for part in cluster.recordings().record(0.05)]
        offsets = {part.process: part.clock_offset_ns for part in parts if part.HasField("clock_offset_ns")}
        assert offsets == {"decode-0": 6000}

    run(scenario)


def test_dead_worker_is_reported() -> None:
    async def scenario(cluster: Cluster) -> None:
        parts: list[pb.RecordedPart] = []
        async for part in cluster.recordings().record(0.3):
            if not parts:
                cluster.workers[1].recorder.add("track", "seen", 1)
                await cluster.workers[0].stop()
            parts.append(part)
        assert collected(parts) == {"prefill-0": [], "decode-0": ["seen"], "router-0": []}
        assert {part.process for part in parts if part.failure} == {"prefill-0"}

    run(scenario)


def test_worker_that_does_not_start_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings_module, "START_TIMEOUT_S", 0.3)

    async def scenario(cluster: Cluster) -> None:
        await cluster.workers[1].stop()
        # Accepts connections and stays silent.
        server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(10), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        cluster.workers[1].address = f"127.0.0.1:{port}"
        async with server:
            parts = [part async for part in cluster.recordings().record(0.1)]
        assert {part.process: part.failure for part in parts if part.failure} == {
            "decode-0": "did not start within 0.3 s"
        }
        assert collected(parts).keys() == {"prefill-0", "decode-0", "router-0"}

    run(scenario)


def test_stopped_worker_does_not_delay_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recordings_module, "COLLECT_TIMEOUT_S", 3.0)
    monkeypatch.setattr(recordings_module, "FIRST_PART_TIMEOUT_S", 0.3)
    monkeypatch.setattr(recordings_module, "NEXT_PART_TIMEOUT_S", 0.3)

    async def scenario(cluster: Cluster) -> None:
        stopped, other = cluster.workers
        stopped.answers = False
        parts: list[pb.RecordedPart] = []
        async for part in cluster.recordings().record(0.05):
            if not parts:
                # More than a connection's buffers hold.
                for _ in range(5000):
                    other.recorder.add("track", "x" * 100, 1)
            parts.append(part)
        assert {part.process: part.failure for part in parts if part.failure} == {"prefill-0": "sent no data in time"}
        assert len(collected(parts)["decode-0"]) == 5000

    run(scenario)


def test_recording_router_refuses_at_once() -> None:
    async def scenario(cluster: Cluster) -> None:
        recordings = cluster.recordings()
        async with aclosing(recordings.record(10.0)) as first:
            await anext(first)
            for process in cluster.processes:
                await process.stop()
            with pytest.raises(OverloadedError, match="another recording is being made; try again"):
                await anext(recordings.record(1.0))
        assert [part.failure != "" async for part in recordings.record(0.05)] == [True] * 3

    run(scenario)


def test_second_recording_is_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with aclosing(cluster.recordings().record(10.0)) as first:
            await anext(first)
            with pytest.raises(OverloadedError, match="another recording is being made"):
                async for _ in cluster.recordings().record(1.0):
                    pytest.fail("it was not refused")
            assert cluster.is_recording == [True] * 3
        await wait_until(lambda: cluster.is_recording == [False] * 3)
        assert [part async for part in cluster.recordings().record(0.05)]

    run(scenario)


def test_invalid_duration() -> None:
    async def scenario(cluster: Cluster) -> None:
        for duration_s in (0.0, 61.0, float("inf"), float("nan")):
            with pytest.raises(InvalidRequestError, match="more than 0 and at most 60 seconds"):
                await anext(cluster.recordings().record(duration_s))

    run(scenario)

"""Serves one process's part of a recording to a router."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from tandem.recording import Recording, Slice
from tandem.v1 import recording_pb2 as pb
from tandem.v1 import recording_pb2_grpc

MAX_DURATION_S = 60.0
# Time for the process's loop to end its recording.
STOP_TIMEOUT_S = 10.0
# Slices encoded at a time, of a worker and of a router, in half a millisecond. A router's slices are requests with all
# their moments.
SLICES_PER_PART = 200
REQUESTS_PER_PART = 50
# Limit per process: several times the size of MAX_SLICES slices, unless each names many requests.
MAX_BYTES = 64 * 2**20


class RecordingService(recording_pb2_grpc.RecordingServicer):
    """Makes one recording at a time."""

    def __init__(
        self,
        process: str,
        role: str,
        start: Callable[[], None],
        stop: Callable[[Callable[[Recording], None]], None],
        slices_per_part: int = SLICES_PER_PART,
    ) -> None:
        """
        Args:
            stop: ends recording, and soon passes the result to its argument, from any thread.
            slices_per_part: slices encoded before other tasks get a turn.
        """
        self._process = process
        self._role = role
        self._start = start
        self._stop = stop
        self._slices_per_part = slices_per_part
        self._is_recording = False

    def add_to(self, server: grpc.aio.Server) -> None:
        recording_pb2_grpc.add_RecordingServicer_to_server(self, server)

    async def RecordProcess(
        self, request: pb.RecordRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.RecordedPart]:
        if not 0 < request.duration_s <= MAX_DURATION_S:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, duration_refusal(request.duration_s))
        if self._is_recording:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another recording is being made")
        self._is_recording = True
        try:
            self._start()
            yield pb.RecordedPart(process=self._process, role=self._role)
            await asyncio.sleep(request.duration_s)
        finally:
            stopping = self._stopped()
            self._is_recording = False
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                recording = await stopping
        except TimeoutError:
            failure = f"its loop did not answer within {STOP_TIMEOUT_S:g} s"
            yield pb.RecordedPart(process=self._process, role=self._role, failure=failure)
            return
        num_dropped, num_bytes = recording.num_dropped, 0
        while slices := recording.take(self._slices_per_part):
            part = pb.RecordedPart(process=self._process, role=self._role, slices=map(encode_slice, slices))
            num_bytes += part.ByteSize()
            if num_bytes <= MAX_BYTES:
                yield part
            else:
                num_dropped += len(slices)
            # Let tokens pass between two parts.
            await asyncio.sleep(0)
        yield pb.RecordedPart(process=self._process, role=self._role, num_dropped=num_dropped)

    def _stopped(self) -> "asyncio.Future[Recording]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Recording] = loop.create_future()

        def set_answer(recording: Recording) -> None:
            if not answer.done():
                answer.set_result(recording)

        def reply(recording: Recording) -> None:
            loop.call_soon_threadsafe(set_answer, recording)

        self._stop(reply)
        return answer


def duration_refusal(duration_s: float) -> str:
    return f"a recording lasts more than 0 and at most {MAX_DURATION_S:g} seconds, not {duration_s:g}"


def encode_slice(kept: Slice) -> pb.RecordedSlice:
    return pb.RecordedSlice(
        track=kept.track,
        name=kept.name,
        start_ns=kept.start_ns,
        # The clock may have been set back meanwhile.
        duration_ns=max(0, kept.end_ns - kept.start_ns),
        request_ids=kept.request_ids,
        request_tokens=kept.request_tokens,
        numbers=kept.numbers,
        detail=kept.detail,
    )

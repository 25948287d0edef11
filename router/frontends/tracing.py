"""Recordings for clients: tandem.v1.Tracing."""

import asyncio
from contextlib import aclosing

import grpc

from tandem.router.errors import RequestError
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.grpc import router_trailer, status_code
from tandem.router.observe.recordings import COLLECT_TIMEOUT_S, Recordings
from tandem.rpc.recording_service import MAX_DURATION_S
from tandem.v1 import recording_pb2 as pb
from tandem.v1 import recording_pb2_grpc

# A client that does not read blocks other recordings no longer than this.
TIMEOUT_S = MAX_DURATION_S + COLLECT_TIMEOUT_S
REFUSAL = (
    "a recording shows the requests of all API keys, and there are several: start the server with --allow-tracing if "
    "each may see the others'"
)


class TracingService(recording_pb2_grpc.TracingServicer):
    def __init__(self, frontend: Frontend, recordings: Recordings) -> None:
        self._frontend = frontend
        self._recordings = recordings

    async def Record(self, request: pb.RecordRequest, context: grpc.aio.ServicerContext) -> None:
        if self._frontend.access.num_keys > 1 and not self._frontend.config.allow_tracing:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, REFUSAL, router_trailer(self._frontend))
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                aclosing(self._recordings.record(request.duration_s)) as parts,
            ):
                async for part in parts:
                    await context.write(part)
            return
        except RequestError as error:
            refusal = status_code(error), str(error)
        except TimeoutError:
            refusal = grpc.StatusCode.DEADLINE_EXCEEDED, "the recording was not read"
        await context.abort(*refusal, router_trailer(self._frontend))

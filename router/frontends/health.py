"""gRPC's standard health service. It needs no key, so it keeps no input and waits for no slow reader."""

import asyncio
from collections.abc import Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.router.frontends.watch_places import WatchPlaces

# A client that takes no message for this long counts as gone.
WRITE_TIMEOUT_S = 60.0

_Status = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):
    """Attributes: places: limits the watches, for all of a router's ports together."""

    def __init__(self, serving: Mapping[str, bool], places: WatchPlaces) -> None:
        self._serving = serving
        self._changed = asyncio.Event()
        self.places = places

    def publish(self, serving: Mapping[str, bool]) -> None:
        self._serving = dict(serving)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this service is unknown")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Sends the status and its changes. A slow client gets only the latest."""
        metadata = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        peer = context.peer()
        if refusal := self.places.take(peer, metadata.get("authorization")):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        # Do not keep an unknown client's strings.
        service = request.service if request.service in self._serving else None
        del request, metadata
        try:
            await self._watch(service, context)
        finally:
            self.places.free(peer)

    async def _watch(self, service: str | None, context: grpc.aio.ServicerContext) -> None:
        sent: int | None = None
        while True:
            changed, status = self._changed, self._status(service)
            if status != sent:
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await context.write(_Status(status=status))
                except TimeoutError:
                    await context.abort(
                        grpc.StatusCode.DEADLINE_EXCEEDED, f"the client took nothing for {WRITE_TIMEOUT_S:g} s"
                    )
                sent = status
            await changed.wait()

    def _status(self, service: str | None) -> int:
        if service is None:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._serving[service] else _Status.NOT_SERVING

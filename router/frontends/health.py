"""The standard health service. It is open to everybody, so that nothing a client sends it is kept, and no client that
reads slowly, or not at all, holds up another."""

import asyncio
from collections.abc import Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Each takes some ten kB. A client that follows the health of its server has one for each connection.
MAX_WATCHES = 1024
# A client that takes nothing for so long counts as gone.
WRITE_TIMEOUT_S = 60.0

_Status = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):
    """Knows the services that it is made with, and no others.

    Attributes:
        num_watches: calls of Watch that go on.
    """

    def __init__(self, serving: Mapping[str, bool]) -> None:
        self._serving = serving
        self._changed = asyncio.Event()
        self.num_watches = 0

    def publish(self, serving: Mapping[str, bool]) -> None:
        """Says which services are served from now on; those who watch are told when they are ready to hear it."""
        self._serving = dict(serving)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of this name is known")
        return _Status(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Sends the status and each later one; of those that come while the client does not read, the last."""
        if self.num_watches >= MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} calls watch already; ask with Check instead"
            )
        # The names are fixed, so that whoever asks for another needs no reminder of which.
        service = request.service if request.service in self._serving else None
        del request
        self.num_watches += 1
        try:
            await self._watch(service, context)
        finally:
            self.num_watches -= 1

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

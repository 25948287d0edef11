"""Answers direct requests to one worker: metrics and integrity check."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, generate_latest

from tandem.messages import WorkerStats
from tandem.rpc.codec import STATS_CODEC
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.worker.events import Event, Inspect

REPLY_TIMEOUT_S = 30.0


class WorkerAdmin(worker_pb2_grpc.WorkerAdminServicer):
    def __init__(self, post: Callable[[Event], None], registry: CollectorRegistry) -> None:
        self._post = post
        self._registry = registry

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerAdminServicer_to_server(self, server)

    async def ReadMetrics(self, request: Any, context: grpc.aio.ServicerContext) -> worker_pb2.WorkerMetrics:
        # It takes a millisecond: keep it off the event loop.
        return worker_pb2.WorkerMetrics(text=await asyncio.to_thread(generate_latest, self._registry))

    async def CheckIntegrity(self, request: Any, context: grpc.aio.ServicerContext) -> worker_pb2.IntegrityReport:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str, WorkerStats]] = loop.create_future()

        def set_answer(violation: str, stats: WorkerStats) -> None:
            if not answer.done():
                answer.set_result((violation, stats))

        def reply(violation: str, stats: WorkerStats) -> None:
            loop.call_soon_threadsafe(set_answer, violation, stats)

        self._post(Inspect(reply))
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                violation, stats = await answer
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the engine thread did not answer")
            raise
        return worker_pb2.IntegrityReport(violation=violation, stats=STATS_CODEC.encode(stats))

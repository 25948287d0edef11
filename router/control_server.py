"""Server of the workers' Control streams."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tandem.messages import PROTOCOL_VERSION, Hello
from tandem.router.router import Router
from tandem.router.workers.worker import Worker
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.codec import ROUTER_CODEC, WORKER_CODEC
from tandem.v1 import worker_pb2_grpc

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0


class ControlServer(worker_pb2_grpc.ClusterServicer):
    def __init__(self, router: Router) -> None:
        self._router = router

    async def Control(self, batches: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                (hello, *rest) = WORKER_CODEC.decode(await anext(aiter(batches)))
        except (StopAsyncIteration, TimeoutError, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a worker must be Hello")
            return
        if not isinstance(hello, Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a worker must be Hello")
            return
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = f"protocol version {hello.protocol_version} is not the router's {PROTOCOL_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            return
        writer = BatchWriter(ROUTER_CODEC)
        try:
            worker = self._router.connect_worker(hello, writer.send, lambda _: writer.close())
        except ValueError as error:
            logger.error("worker %s refused: %s", hello.worker_id, error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            return
        reader = asyncio.create_task(self._read(worker, rest, batches))
        try:
            async for batch in writer.batches():
                yield batch
        finally:
            reader.cancel()
            self._router.lose_worker(worker, "disconnected", "its control stream ended")

    async def _read(self, worker: Worker, first: list[Any], batches: AsyncIterator[Any]) -> None:
        reason = "its control stream ended"
        try:
            for message in first:
                self._router.receive(worker, message)
            async for batch in batches:
                for message in WORKER_CODEC.decode(batch):
                    self._router.receive(worker, message)
        except (grpc.RpcError, ValueError) as error:
            reason = f"its control stream broke: {error}"
        finally:
            self._router.lose_worker(worker, "disconnected", reason)

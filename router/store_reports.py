"""Server of the page stores' streams of reports."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tandem.messages import PROTOCOL_VERSION, StoreJoin, Welcome
from tandem.router.router import Router
from tandem.router.workers.store_registry import Store
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.codec import ROUTER_CODEC, STORE_REPORT_CODEC
from tandem.v1 import store_pb2_grpc

JOIN_TIMEOUT_S = 5.0


class StoreReports(store_pb2_grpc.StoreReportsServicer):
    def __init__(self, router: Router) -> None:
        self._router = router

    async def Report(self, batches: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                (join, *rest) = STORE_REPORT_CODEC.decode(await anext(aiter(batches)))
        except (StopAsyncIteration, TimeoutError, ValueError):
            join, rest = None, []
        if not isinstance(join, StoreJoin):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a store must be StoreJoin")
            return
        if join.protocol_version != PROTOCOL_VERSION:
            reason = f"protocol version {join.protocol_version} is not the router's {PROTOCOL_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            return
        stores = self._router.stores
        writer = BatchWriter(ROUTER_CODEC)
        store = stores.connect(join, writer.send, lambda _: writer.close())
        store.send([Welcome(self._router.incarnation, self._router.wants_prefixes)])
        stores.repeat_reset(store)
        stores.name_peers()
        reader = asyncio.create_task(self._read(store, rest, batches))
        try:
            async for batch in writer.batches():
                yield batch
        finally:
            reader.cancel()
            stores.lose(store, "its stream ended")

    async def _read(self, store: Store, first: list[Any], batches: AsyncIterator[Any]) -> None:
        reason = "its stream ended"
        try:
            for message in first:
                self._router.stores.receive(store, message)
            async for batch in batches:
                for message in STORE_REPORT_CODEC.decode(batch):
                    self._router.stores.receive(store, message)
                    # Tokens go first: a batch with thousands of identities takes milliseconds.
                    await asyncio.sleep(0)
        except (grpc.RpcError, ValueError) as error:
            reason = f"its stream broke: {error}"
        finally:
            self._router.stores.lose(store, reason)

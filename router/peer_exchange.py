"""Exchange of loads between the routers, over gRPC on the internal ports."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from tandem.messages import Adapters
from tandem.repeat_limit import RepeatLimit
from tandem.router.adapters.names import AdapterNames
from tandem.router.workers.peer_counts import NOTHING, AssignedLoad, PeerCounts, RouterCounts
from tandem.rpc.calls import call_errors, reason_of
from tandem.rpc.codec import ADAPTERS_CODEC
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import router_pb2 as pb
from tandem.v1 import router_pb2_grpc, worker_pb2

logger = logging.getLogger(__name__)

# Delay of the known loads. Meanwhile the routers together may exceed cluster-wide limits.
INTERVAL_S = 0.1
RETRY_DELAY_S = 0.5
# Limit for telling one router of adapters, in seconds. One that cannot be reached learns them when it can.
SHARE_TIMEOUT_S = 2.0


class PeerExchange(router_pb2_grpc.RouterPeerServicer):
    """Both ends of one router's exchange. Belongs to the router's loop."""

    def __init__(
        self,
        router_id: str,
        peers: Mapping[str, str],
        counts: PeerCounts,
        own_counts: Callable[[], RouterCounts],
        on_counts: Callable[[], None],
        credentials: ClusterCredentials,
        adapters: AdapterNames,
    ) -> None:
        """
        Args:
            counts: store of the other routers' loads.
            on_counts: called after each received load.
            adapters: this router's names.
        """
        self._router_id = router_id
        self._peers = peers
        self._counts = counts
        self._own_counts = own_counts
        self._on_counts = on_counts
        self._credentials = credentials
        # The latest call of each router: an older one, whose end is noticed late, changes nothing any more.
        self._calls: dict[str, object] = {}
        self._adapters = adapters
        # Of the routers that can be reached, by address.
        self._stubs: dict[str, router_pb2_grpc.RouterPeerStub] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for address in self._peers.values():
                tasks.create_task(self._tell(address))

    async def ShareCounts(self, batches: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> pb.ShareCountsEnd:
        call, router_id = object(), ""
        try:
            async for message in batches:
                if message.router_id not in self._peers:
                    continue
                router_id = message.router_id
                if not message.is_change:
                    self._calls[router_id] = call
                elif self._calls.get(router_id) is not call or not self._counts.knows(router_id):
                    # What it changes was forgotten: the next call begins with the whole load.
                    break
                self._counts.record(router_id, decode_counts(message), is_change=message.is_change)
                self._on_counts()
        finally:
            if self._calls.get(router_id) is call:
                del self._calls[router_id]
                # The other routers may take its clients at once.
                self._counts.forget(router_id)
                self._on_counts()
        return pb.ShareCountsEnd()

    async def ShareAdapters(
        self, request: worker_pb2.Adapters, context: grpc.aio.ServicerContext
    ) -> worker_pb2.Adapters:
        self._adapters.merge(ADAPTERS_CODEC.decode(request).entries)
        return self._own_adapters()

    async def share_adapters(self) -> None:
        """Exchanges names of adapters with all routers that can be reached."""
        await asyncio.gather(*(self._exchange_adapters(stub) for stub in self._stubs.values()))

    async def _exchange_adapters(self, stub: Any) -> None:
        # Where this fails, the call of the counts fails too, and its next one begins with the names.
        with contextlib.suppress(grpc.aio.AioRpcError, ConnectionError), call_errors():
            answer = await stub.ShareAdapters(
                self._own_adapters(), metadata=self._credentials.metadata, timeout=SHARE_TIMEOUT_S
            )
            self._adapters.merge(ADAPTERS_CODEC.decode(answer).entries)

    def _own_adapters(self) -> worker_pb2.Adapters:
        own: worker_pb2.Adapters = ADAPTERS_CODEC.encode(Adapters(self._adapters.entries()))
        return own

    async def _tell(self, address: str) -> None:
        limit = RepeatLimit()
        while True:
            try:
                with call_errors():
                    async with self._credentials.open_channel(address) as channel:
                        stub = self._stubs[address] = router_pb2_grpc.RouterPeerStub(channel)
                        await self._exchange_adapters(stub)
                        await stub.ShareCounts(self._messages(), metadata=self._credentials.metadata)
            except (grpc.aio.AioRpcError, ConnectionError) as error:
                details = reason_of(error)
                if limit.allows(details):
                    logger.info("router at %s: %s", address, details)
            finally:
                self._stubs.pop(address, None)
            await asyncio.sleep(RETRY_DELAY_S)

    async def _messages(self) -> AsyncIterator[pb.RouterCounts]:
        feed = CountsFeed(self._router_id, self._own_counts)
        while True:
            yield feed.next()
            await asyncio.sleep(INTERVAL_S)


class CountsFeed:
    """What one router tells another: its whole load first, then changes."""

    def __init__(self, router_id: str, own_counts: Callable[[], RouterCounts]) -> None:
        self._router_id = router_id
        self._own_counts = own_counts
        self._told: Mapping[str, AssignedLoad] | None = None

    def next(self) -> pb.RouterCounts:
        counts, told = self._own_counts(), self._told
        self._told = assigned = counts.assigned
        if told is not None:
            gone = dict.fromkeys(told.keys() - assigned.keys(), NOTHING)
            assigned = {name: load for name, load in assigned.items() if told.get(name) != load} | gone
        return pb.RouterCounts(
            router_id=self._router_id,
            num_requests=counts.num_requests,
            num_queued=counts.num_queued,
            num_requests_by_key=counts.num_requests_by_key,
            assigned={worker_id: pb.AssignedLoad(**load._asdict()) for worker_id, load in assigned.items()},
            pid=counts.pid,
            head_starts=counts.head_starts,
            is_change=told is not None,
        )


def decode_counts(message: Any) -> RouterCounts:
    return RouterCounts(
        message.num_requests,
        message.num_queued,
        dict(message.num_requests_by_key),
        {
            worker_id: AssignedLoad(*(getattr(load, name) for name in AssignedLoad._fields))
            for worker_id, load in message.assigned.items()
        },
        message.pid,
        tuple(message.head_starts),
    )

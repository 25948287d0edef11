import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import pytest

from tandem.router.adapters.names import AdapterNames
from tandem.router.peer_exchange import INTERVAL_S, CountsFeed, PeerExchange, decode_counts
from tandem.router.workers.peer_counts import AssignedLoad, PeerCounts, RouterCounts
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import router_pb2 as pb
from tandem.v1 import router_pb2_grpc
from tests.fakes.link_ends import wait_until
from tests.fakes.scripted_adapters import make_ref

TOKEN = "the-token"


class End:
    """Attributes: own: this router's load; counts: the others' loads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own = RouterCounts(0, 0)
        self.counts = PeerCounts(time.monotonic)
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self.adapters = AdapterNames(name)
        self._task: asyncio.Task[None] | None = None

    async def serve(self, port: int = 0) -> None:
        self._server = new_server([cluster_auth(TOKEN)])
        self.address = bind(self._server, "127.0.0.1", port)

    async def join(self, *others: "End") -> None:
        peers = {other.name: other.address for other in others}
        credentials = ClusterCredentials(TOKEN)
        exchange = self.exchange = PeerExchange(
            self.name, peers, self.counts, lambda: self.own, lambda: None, credentials, self.adapters
        )
        assert self._server is not None
        router_pb2_grpc.add_RouterPeerServicer_to_server(exchange, self._server)
        await self._server.start()
        self._task = asyncio.create_task(exchange.run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=0.0)


def test_each_knows_what_all_others_have() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(20.0), AsyncExitStack() as stack:
            ends = [End(name) for name in ("r0", "r1", "r2")]
            for end in ends:
                await end.serve()
                stack.push_async_callback(end.stop)
            for end in ends:
                await end.join(*(other for other in ends if other is not end))
            ends[0].own = RouterCounts(4, 2, {"digest": 3}, {"p": AssignedLoad(4, 10**9)}, pid=17)
            ends[1].own = RouterCounts(1, 1)
            changed = time.monotonic()
            await wait_until(lambda: ends[2].counts.num_requests == 5)
            assert time.monotonic() - changed < 10 * INTERVAL_S
            assert ends[2].counts.counts_of("r0") == ends[0].own
            await wait_until(lambda: (ends[1].counts.num_queued, ends[0].counts.num_queued) == (2, 1))
            # A stopped router has no load, and is heard again at its old address.
            port = int(ends[0].address.rpartition(":")[2])
            await ends[0].stop()
            gone = time.monotonic()
            await wait_until(lambda: ends[2].counts.counts_of("r0") is None)
            assert time.monotonic() - gone < 1.0
            again = End("r0")
            await again.serve(port)
            stack.push_async_callback(again.stop)
            again.own = RouterCounts(9, 0)
            await again.join(ends[1], ends[2])
            await wait_until(lambda: ends[1].counts.num_requests == 9)
            await wait_until(lambda: again.counts.num_requests == 1)

    asyncio.run(scenario())


def test_a_stranger_s_counts_count_for_nothing() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(20.0), AsyncExitStack() as stack:
            one, other = End("r0"), End("r1")
            for end in (one, other):
                await end.serve()
                stack.push_async_callback(end.stop)
            await one.join(other)
            async with open_channel(one.address) as channel:
                stub = router_pb2_grpc.RouterPeerStub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match="cluster token"):
                    await stub.ShareCounts(iter([pb.RouterCounts(router_id="r1", num_queued=9)]))
                metadata = (("tandem-cluster-token", TOKEN),)
                await stub.ShareCounts(iter([pb.RouterCounts(router_id="r7", num_queued=9)]), metadata=metadata)
                assert one.counts.num_queued == 0

                async def one_and_no_more() -> AsyncIterator[pb.RouterCounts]:
                    yield pb.RouterCounts(router_id="r1", num_queued=9)
                    await wait_until(lambda: one.counts.num_queued == 9)

                await stub.ShareCounts(one_and_no_more(), metadata=metadata)
                assert one.counts.num_queued == 0

    asyncio.run(scenario())


def test_a_router_that_was_silent_tells_its_whole_load_again() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(20.0), AsyncExitStack() as stack:
            one, other = End("r0"), End("r1")
            for end in (one, other):
                await end.serve()
                stack.push_async_callback(end.stop)
            other.own = RouterCounts(3, 0, assigned={"w0": AssignedLoad(3)})
            await one.join(other)
            await other.join(one)
            await wait_until(lambda: one.counts.assigned_to("w0") == AssignedLoad(3))
            # As after FRESH_S of silence.
            one.counts.forget("r1")
            await wait_until(lambda: one.counts.assigned_to("w0") == AssignedLoad(3))

    asyncio.run(scenario())


def test_the_late_end_of_an_old_call_forgets_nothing() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(20.0), AsyncExitStack() as stack:
            one, other = End("r0"), End("r1")
            for end in (one, other):
                await end.serve()
                stack.push_async_callback(end.stop)
            await one.join(other)
            metadata = (("tandem-cluster-token", TOKEN),)
            is_over = asyncio.Event()

            async def say(num_requests: int) -> AsyncIterator[pb.RouterCounts]:
                yield pb.RouterCounts(router_id="r1", num_requests=num_requests)
                await is_over.wait()

            async with open_channel(one.address) as channel:
                stub = router_pb2_grpc.RouterPeerStub(channel)
                old = stub.ShareCounts(say(1), metadata=metadata)
                await wait_until(lambda: one.counts.num_requests == 1)
                new = stub.ShareCounts(say(2), metadata=metadata)
                await wait_until(lambda: one.counts.num_requests == 2)
                old.cancel()
                await asyncio.sleep(2 * INTERVAL_S)
                assert one.counts.num_requests == 2
                is_over.set()
                await new
                assert one.counts.num_requests == 0

    asyncio.run(scenario())


def test_a_router_tells_its_load_once_and_then_changes() -> None:
    assigned = {f"w{i}": AssignedLoad(1) for i in range(1000)}
    feed = CountsFeed("r0", lambda: RouterCounts(3, 1, assigned=dict(assigned)))
    counts = PeerCounts(time.monotonic)
    sizes = []
    for change in ({}, {}, {"w1": AssignedLoad(2)}, {"w2": None}):
        assigned.update({name: load for name, load in change.items() if load})
        for name in [name for name, load in change.items() if load is None]:
            del assigned[name]
        message = feed.next()
        sizes.append(len(message.assigned))
        counts.record("r0", decode_counts(message), is_change=message.is_change)
    assert sizes == [1000, 0, 1, 1]
    assert counts.counts_of("r0") == RouterCounts(3, 1, assigned=assigned)


def test_routers_agree_about_adapters_and_one_that_was_away_learns_them() -> None:
    async def scenario() -> None:
        here, there = End("router-0"), End("router-1")
        for end in (here, there):
            await end.serve()
        here.adapters.change("early", make_ref("a"))
        await here.join(there)
        await there.join(here)
        await wait_until(lambda: there.adapters.find("early") is not None)
        assert there.adapters.is_complete
        there.adapters.change("late", make_ref("b"))
        await there.exchange.share_adapters()
        assert here.adapters.find("late") == make_ref("b")
        here.adapters.change("early", None)
        await here.exchange.share_adapters()
        assert there.adapters.find("early") is None
        await there.stop()
        await here.exchange.share_adapters()
        await here.stop()

    asyncio.run(scenario())

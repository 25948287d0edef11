"""Stores that ask each other over real sockets."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from tandem.deploy.host.certificates import make_certificates
from tandem.messages import PageFormat
from tandem.pagestore.messages import HOST, PEER
from tandem.pagestore.server.peers import peer_store
from tandem.pagestore.server.peers.parts import page_digest
from tandem.pagestore.server.peers.peer_store import LOOK_S
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2, store_pb2_grpc
from tests.fakes.link_ends import wait_until
from tests.fakes.peer_nodes import TOKEN, Node, chain, nodes
from tests.fakes.router_harness import run
from tests.fakes.store_client import key

PAGE_BYTES = 600_000


class Scripted(store_pb2_grpc.PeerPagesServicer):
    """A peer that has every page, and sends what the test says."""

    def __init__(self, *parts: store_pb2.PagePart, identities: bytes | None = None, hangs: bool = False) -> None:
        self.parts = parts
        self.identities = identities
        self.hangs = hangs
        self.num_looks = 0
        self.num_cancelled = 0

    async def Look(self, request: Any, context: grpc.aio.ServicerContext) -> store_pb2.PageRun:
        self.num_looks += 1
        if self.hangs:
            try:
                await asyncio.sleep(60.0)
            finally:
                self.num_cancelled += 1
        identities = b"i" * 8 * len(request.keys) if self.identities is None else self.identities
        return store_pb2.PageRun(namespace="space", identities=identities)

    async def Fetch(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        for part in self.parts:
            await context.write(part)
        if not self.parts:
            try:
                await asyncio.sleep(60.0)
            finally:
                self.num_cancelled += 1


async def add_scripted(own: Node, scripted: Scripted) -> Node:
    """Starts a scripted peer of `own`."""
    other = Node("scripted", 4, own.format, ClusterCredentials(TOKEN))
    other.serves = scripted
    await other.start()
    own.tier.set_peers([other.peer])
    return other


@pytest.mark.parametrize("is_secure", [False, True])
def test_pages_of_another_node_arrive_with_their_content(is_secure: bool) -> None:
    @run
    async def scenario() -> None:
        async with nodes("a", "b", tls=make_certificates() if is_secure else None) as (a, b):
            names = chain("x", 40)
            await b.keep(names)
            await a.keep(names[:2])
            contents, tiers, answers = await a.find([*names, "beyond"])
            assert contents == [b.content(name) for name in names]
            assert tiers == [HOST] * 2 + [PEER] * 38
            assert answers[0].is_asking and (len(answers[0].slots), answers[0].num_coming) == (2, 0)
            assert (answers[1].is_asking, answers[1].num_coming) == (False, 38)
            # By now they are in memory here.
            assert (await a.find(names))[1] == [HOST] * 40
            await wait_until(lambda: a.num_pinned() == b.num_pinned() == 0)
            assert b.store.stats().counts.keys_sought == 0
            assert a.store.stats().counts.hits == {HOST: 42, PEER: 38}

    scenario()


@run
async def test_the_longest_run_of_several_nodes_is_read() -> None:
    async with nodes("a", "b", "c") as (a, b, c):
        names = chain("x", 6)
        await b.keep(names[:2])
        await c.keep(names)
        contents, tiers, _ = await a.find(names)
        assert contents == [c.content(name) for name in names] and tiers == [PEER] * 6


@run
async def test_pages_that_nobody_has_are_a_miss_at_once() -> None:
    async with nodes("a", "b") as (a, _):
        began = time.monotonic()
        contents, _, answers = await a.find(chain("x", 3))
        assert (contents, len(answers)) == ([], 2)
        assert time.monotonic() - began < LOOK_S
        assert a.store.stats().counts.keys_missed == 3


@run
async def test_a_node_without_peers_answers_once() -> None:
    async with nodes("a") as (a,):
        assert len((await a.find(chain("x", 3)))[2]) == 1


@run
async def test_a_peer_killed_while_it_sends_ends_the_run() -> None:
    async with nodes("a", "b") as (a, b):
        names = chain("x", 40)
        await b.keep(names)
        found = asyncio.create_task(a.find(names))
        await wait_until(lambda: b.num_pinned() > 0)
        await b.server.stop(None)
        contents, _, _ = await found
        assert contents == [b.content(name) for name in names[: len(contents)]]
        assert len(contents) < 40
        await wait_until(lambda: a.store.stats().num_reading == 0)
        # It is not asked again for a while.
        assert len((await a.find(chain("y", 2)))[2]) == 1
        await wait_until(lambda: b.num_pinned() == 0)


@run
async def test_a_silent_peer_costs_one_deadline() -> None:
    async with nodes("a") as (a,):
        scripted = Scripted(hangs=True)
        other = await add_scripted(a, scripted)
        began = time.monotonic()
        assert (await a.find(chain("x", 2)))[0] == []
        assert LOOK_S <= time.monotonic() - began < LOOK_S + 1.0
        assert len((await a.find(chain("x", 2)))[2]) == 1
        assert scripted.num_looks == 1
        await wait_until(lambda: scripted.num_cancelled == 1)
        await other.stop()


@run
async def test_a_peer_that_stops_sending_costs_one_deadline() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_store, "PART_S", 0.2)
        async with nodes("a") as (a,):
            scripted = Scripted()
            other = await add_scripted(a, scripted)
            contents, _, answers = await a.find(chain("x", 4))
            assert contents == [] and answers[1].num_coming == 4
            await wait_until(lambda: a.store.stats().num_free == 64)
            await wait_until(lambda: scripted.num_cancelled == 1)
            assert len((await a.find(chain("x", 4)))[2]) == 1
            await other.stop()


CONTENT = bytes(PAGE_BYTES)


@pytest.mark.parametrize(
    "parts",
    [
        # The digest of another key; torn; too long; none.
        (store_pb2.PagePart(content=CONTENT, digest=page_digest(b"k" * 32, CONTENT)),),
        (store_pb2.PagePart(content=CONTENT[:5]),),
        (store_pb2.PagePart(content=CONTENT + b"x", digest=b"d" * 16),),
        (store_pb2.PagePart(content=CONTENT),),
    ],
)
def test_a_lying_peer_is_believed_nothing(parts: tuple[store_pb2.PagePart, ...]) -> None:
    @run
    async def scenario() -> None:
        async with nodes("a", page_bytes=PAGE_BYTES) as (a,):
            other = await add_scripted(a, Scripted(*parts))
            assert (await a.find(chain("x", 2)))[0] == []
            assert a.store.stats().num_free == 64
            assert len((await a.find(chain("x", 2)))[2]) == 1
            await other.stop()

    scenario()


@pytest.mark.parametrize("identities", [b"i" * 7, b"i" * 24])
def test_an_impossible_run_is_refused(identities: bytes) -> None:
    @run
    async def scenario() -> None:
        async with nodes("a") as (a,):
            other = await add_scripted(a, Scripted(identities=identities))
            assert (await a.find(chain("x", 2)))[0] == []
            assert len((await a.find(chain("x", 2)))[2]) == 1
            await other.stop()

    scenario()


@run
async def test_another_format_is_refused() -> None:
    async with nodes("a") as (a,):
        other = Node("b", 4, PageFormat("another model", PAGE_BYTES, "layout"), ClusterCredentials(TOKEN))
        await other.start()
        await other.keep(["x0"])
        a.tier.set_peers([other.peer])
        assert (await a.find(["x0"]))[0] == []
        assert len((await a.find(["x0"]))[2]) == 1
        await other.stop()


@run
async def test_a_stranger_is_refused() -> None:
    async with nodes("a") as (a,):
        other = Node("b", 4, a.format, ClusterCredentials(TOKEN))
        await other.start()
        await other.keep(["x0"])
        stranger = ClusterCredentials("another")
        async with stranger.open_channel(other.address) as channel:
            call = store_pb2_grpc.PeerPagesStub(channel).Look(store_pb2.LookRequest(), metadata=stranger.metadata)
            with pytest.raises(grpc.aio.AioRpcError, match="the cluster token is missing or wrong"):
                await call
        await other.stop()


@run
async def test_a_purge_purges_the_peers_once() -> None:
    async with nodes("a", "b", "c") as (a, b, c):
        names = chain("x", 3)
        await b.keep(names)
        await c.keep(names)
        a.purge()
        assert (await a.find(names))[0] == []
        await wait_until(lambda: b.num_ready == c.num_ready == 0)
        await asyncio.sleep(0.2)
        assert [node.store.stats().counts.purges for node in (a, b, c)] == [1, 1, 1]
        await b.keep(names)
        assert len((await a.find(names))[0]) == 3
        # Who joins learns of purges that it may have missed.
        late = Node("late", 8, a.format, ClusterCredentials(TOKEN))
        await late.start()
        await late.keep(["y0"])
        a.tier.set_peers([b.peer, c.peer, late.peer])
        assert (await a.find(["y0"]))[0] == []
        await late.stop()


@run
async def test_a_purge_ends_reads_under_way() -> None:
    async with nodes("a") as (a,):
        scripted = Scripted()
        other = await add_scripted(a, scripted)
        found = asyncio.create_task(a.find(chain("x", 4)))
        await wait_until(lambda: a.store.stats().num_reading == 4)
        a.purge()
        assert (await found)[0] == []
        await wait_until(lambda: a.store.stats().num_free == 64)
        await other.stop()


@run
async def test_an_ended_find_cancels_its_question() -> None:
    async with nodes("a") as (a,):
        scripted = Scripted(hangs=True)
        other = await add_scripted(a, scripted)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_store, "LOOK_S", 30.0)
            found = asyncio.create_task(a.find(["x0"]))
            await wait_until(lambda: scripted.num_looks == 1)
            a.end_find()
            await wait_until(lambda: scripted.num_cancelled == 1)
            found.cancel()
            assert a.store.stats().num_finds == a.store.stats().num_waiting == 0
        await other.stop()


@run
async def test_pages_that_a_peer_has_evicted_are_a_miss_and_no_failure() -> None:
    async with nodes("a", "b", num_slots=4) as (a, b):
        await b.keep(chain("x", 4))
        b.tier.set_peers([])
        assert a.tier.ask([]) is not None
        run = await a.tier._peers[b.peer].look(tuple(map(key, chain("x", 4))))
        a.tier._remember(run, a.tier._peers[b.peer])
        await b.keep(chain("y", 4))
        contents, _, answers = await a.find(chain("x", 4))
        assert contents == [] and answers[0].num_coming == 4
        assert len((await a.find(chain("x", 4)))[2]) == 2

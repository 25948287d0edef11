"""Peers that are slow, silent or lie cost a deadline once."""

import time

import pytest

from tandem.messages import PageFormat
from tandem.pagestore.server.peers import peer_store
from tandem.pagestore.server.peers.parts import page_digest
from tandem.pagestore.server.peers.peer_store import LOOK_S
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2
from tests.fakes.link_ends import wait_until
from tests.fakes.peer_nodes import TOKEN, Node, chain, nodes
from tests.fakes.router_harness import run
from tests.fakes.scripted_peer import ScriptedPeer, add_scripted

PAGE_BYTES = 600_000


@run
async def test_a_silent_peer_costs_one_deadline() -> None:
    async with nodes("a") as (a,):
        scripted = ScriptedPeer(hangs=True)
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
            scripted = ScriptedPeer()
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
            other = await add_scripted(a, ScriptedPeer(*parts))
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
            other = await add_scripted(a, ScriptedPeer(identities=identities))
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

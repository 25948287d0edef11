"""Stores that ask each other over real sockets."""

import asyncio
import time

import pytest

from tandem.deploy.host.certificates import make_certificates
from tandem.pagestore.messages import HOST, PEER
from tandem.pagestore.server.peers import peer_store
from tandem.pagestore.server.peers.peer_store import LOOK_S
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.link_ends import wait_until
from tests.fakes.peer_nodes import TOKEN, Node, chain, nodes
from tests.fakes.router_harness import run
from tests.fakes.scripted_peer import ScriptedPeer, add_scripted
from tests.fakes.store_client import key


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
        scripted = ScriptedPeer()
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
        scripted = ScriptedPeer(hangs=True)
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
async def test_a_find_does_not_wait_for_a_peer_that_is_no_longer_named() -> None:
    async with nodes("a") as (a,):
        scripted = ScriptedPeer(hangs=True)
        other = await add_scripted(a, scripted)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_store, "LOOK_S", 30.0)
            found = asyncio.create_task(a.find(["x0"]))
            await wait_until(lambda: scripted.num_looks == 1)
            a.tier.set_peers([])
            async with asyncio.timeout(5.0):
                assert (await found)[0] == []
        await other.stop()


@run
async def test_pages_that_a_peer_has_evicted_are_a_miss_and_no_failure() -> None:
    async with nodes("a", "b", num_slots=4) as (a, b):
        names = chain("x", 4)
        await b.keep(names)
        assert a.tier.ask(tuple(map(key, names))) is not None
        await wait_until(lambda: a.tier.find(key("x3")) is not None)
        await b.keep(chain("y", 4))
        contents, _, answers = await a.find(names)
        assert contents == [] and answers[0].num_coming == 4
        assert a.store.stats().counts.failed_reads == 4
        # It is asked again.
        assert (await a.find(chain("y", 4)))[0] == [b.content(name) for name in chain("y", 4)]

"""The answers of a store to another one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tandem.pagestore.server.peers import service
from tandem.pagestore.server.peers.parts import MAX_FETCH_KEYS, PART_BYTES, page_digest
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2, store_pb2_grpc, worker_pb2
from tests.fakes.link_ends import wait_until
from tests.fakes.peer_nodes import TOKEN, Node, chain, nodes
from tests.fakes.router_harness import run
from tests.fakes.store_client import key


class Asker:
    """Another node's store, call by call."""

    def __init__(self, node: Node, channel: grpc.aio.Channel, token: str) -> None:
        one = node.format
        self.format = worker_pb2.PageFormat(
            model_fingerprint=one.model_fingerprint, page_bytes=one.page_bytes, layout=one.layout
        )
        self._stub = store_pb2_grpc.PeerPagesStub(channel)
        self._metadata = ClusterCredentials(token).metadata

    def fetch(self, *keys: bytes) -> Any:
        request = store_pb2.FetchRequest(page_format=self.format, keys=keys)
        return self._stub.Fetch(request, metadata=self._metadata)

    async def pages(self, *keys: bytes) -> list[tuple[bytes, bytes]]:
        """Returns contents and digests."""
        pages, content = [], b""
        async for part in self.fetch(*keys):
            assert len(part.content) <= PART_BYTES
            content += part.content
            if part.digest:
                pages.append((content, part.digest))
                content = b""
        assert not content
        return pages

    async def look(self, *keys: bytes) -> Any:
        return await self._stub.Look(store_pb2.LookRequest(page_format=self.format, keys=keys), metadata=self._metadata)


@asynccontextmanager
async def asking(node: Node, token: str = TOKEN) -> AsyncIterator[Asker]:
    async with ClusterCredentials(token).open_channel(node.address) as channel:
        yield Asker(node, channel, token)


@run
async def test_a_run_is_described_and_sent_as_far_as_it_is_there() -> None:
    async with nodes("a") as (a,), asking(a) as asker:
        await a.keep(["x0", "x1"])
        wanted = tuple(map(key, chain("x", 4)))
        found = await asker.look(*wanted)
        assert (found.parent, found.namespace, len(found.identities)) == (b"", "space", 16)
        assert (await asker.look(*wanted[1:])).parent == wanted[0]
        assert not (await asker.look(key("y"))).identities
        contents = [a.content("x0"), a.content("x1")]
        assert await asker.pages(*wanted) == [
            (content, page_digest(name, content)) for name, content in zip(wanted, contents, strict=False)
        ]
        await wait_until(lambda: a.num_pinned() == 0)


@run
async def test_a_stranger_is_refused() -> None:
    async with nodes("a") as (a,), asking(a, "another") as asker:
        for call in (asker.look(), asker.pages()):
            with pytest.raises(grpc.aio.AioRpcError, match="the cluster token is missing or wrong"):
                await call


@run
async def test_bad_questions_are_refused() -> None:
    async with nodes("a") as (a,), asking(a) as asker:
        many = [bytes([number]) * 32 for number in range(MAX_FETCH_KEYS + 1)]
        for keys in (many, [b"short"], [many[0], many[0]]):
            with pytest.raises(grpc.aio.AioRpcError, match=f"keys must be at most {MAX_FETCH_KEYS} different ones"):
                await asker.pages(*keys)
        asker.format.model_fingerprint = "another"
        with pytest.raises(grpc.aio.AioRpcError, match="models differ: the asking store has loaded another"):
            await asker.look()


@run
async def test_a_reader_that_does_not_read_pins_no_page_for_long() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "FETCH_S", 0.3)
        patch.setattr(service, "MAX_FETCHES", 1)
        async with nodes("a", page_bytes=2**22) as (a,), asking(a) as asker:
            names = chain("x", 16)
            await a.keep(names)
            call = asker.fetch(*map(key, names))
            await wait_until(lambda: a.num_pinned() == 16)
            with pytest.raises(grpc.aio.AioRpcError, match="1 fetches are under way"):
                await asker.pages(key("x0"))
            await wait_until(lambda: a.num_pinned() == 0)
            call.cancel()


@run
async def test_a_cancelled_fetch_unpins() -> None:
    async with nodes("a", page_bytes=2**22) as (a,), asking(a) as asker:
        names = chain("x", 16)
        await a.keep(names)
        call = asker.fetch(*map(key, names))
        await wait_until(lambda: a.num_pinned() == 16)
        call.cancel()
        await wait_until(lambda: a.num_pinned() == 0)

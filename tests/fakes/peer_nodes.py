"""Nodes with page stores that ask each other over sockets. A page's content follows from its name."""

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b

from tandem.config import ClusterTls
from tandem.messages import PROTOCOL_VERSION, PageFormat, Peer
from tandem.pagestore.messages import (
    PEER,
    STORE_CLIENT_CODEC,
    STORE_SERVER_CODEC,
    EndFind,
    Find,
    Found,
    Purge,
    Put,
    PutGranted,
    StoreHello,
    StoreWelcome,
    Wrote,
)
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.peers.peer_tier import PeerTier
from tandem.pagestore.server.peers.service import PeerPages
from tandem.pagestore.server.server import StoreServer
from tandem.rpc.auth import cluster_auth
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2_grpc
from tests.fakes.store_client import identity, key

TOKEN = "a token"
POLL_S = 0.02


class Node:
    """One node: a region, a store with its server, and a worker's session with it.

    Attributes:
        serves: answers the peers; tests may replace it before the start.
    """

    def __init__(self, name: str, num_slots: int, page_format: PageFormat, credentials: ClusterCredentials) -> None:
        self.name = name
        self.format = page_format
        self.region = memoryview(bytearray(num_slots * page_format.page_bytes))
        self.sessions = StoreServer(self._make, lambda: None)
        self.tier = PeerTier(self.region, page_format, credentials, time.monotonic, self.sessions.poll_soon)
        self.store = PageStore(num_slots, time.monotonic, [(PEER, self.tier)])
        self.serves: store_pb2_grpc.PeerPagesServicer = PeerPages(self.sessions, self.region, self.tier.hear_purges)
        self.address = ""
        self._credentials = credentials
        self._numbers = itertools.count(1)
        self._last = 0
        self._answers: deque[object] = deque()
        self._writer = BatchWriter(STORE_CLIENT_CODEC)

    def _make(self, page_format: PageFormat) -> PageStore:
        return self.store

    @property
    def peer(self) -> Peer:
        return Peer(self.name, "life", self.address)

    async def start(self, port: int = 0) -> None:
        self.server = new_server([cluster_auth(TOKEN)])
        self.address = bind(self.server, "127.0.0.1", port, self._credentials.for_server())
        store_pb2_grpc.add_PeerPagesServicer_to_server(self.serves, self.server)
        self.sessions.add_to(self.server)
        await self.server.start()
        self._polls = asyncio.create_task(self.sessions.run(POLL_S))
        self._channel = self._credentials.open_channel(self.address)
        stub = store_pb2_grpc.PageStoreStub(self._channel)
        self._call = stub.Session(self._writer.batches(), metadata=self._credentials.metadata)
        welcome = await self.ask(StoreHello(PROTOCOL_VERSION, "w", self.name, os.getpid(), self.format))
        assert isinstance(welcome, StoreWelcome)

    async def stop(self) -> None:
        await self.tier.stop()
        self._writer.close()
        await self._channel.close()
        await self.server.stop(None)
        self._polls.cancel()

    def content(self, name: str) -> bytes:
        block = blake2b(name.encode(), digest_size=64).digest()
        return (block * (self.format.page_bytes // 64 + 1))[: self.format.page_bytes]

    def page(self, slot: int) -> bytes:
        size = self.format.page_bytes
        return bytes(self.region[slot * size : (slot + 1) * size])

    async def keep(self, names: Sequence[str]) -> None:
        """Stores a chain of pages."""
        put = Put(next(self._numbers), "space", b"", tuple(map(key, names)), tuple(map(identity, names)))
        granted = await self.ask(put)
        assert isinstance(granted, PutGranted) and min(granted.slots) >= 0
        size = self.format.page_bytes
        for name, slot in zip(names, granted.slots, strict=True):
            self.region[slot * size : (slot + 1) * size] = self.content(name)
        self.tell(Wrote(granted.slots, granted.generations))
        # The answer comes when the store has the pages.
        await self.find([])

    async def find(self, names: Sequence[str]) -> tuple[list[bytes], list[int], list[Found]]:
        """Returns contents and tiers of the run, and all answers."""
        number = self._last = next(self._numbers)
        answers = [await self.ask(Find(number, tuple(map(key, names))))]
        while answers[-1].num_coming or answers[-1].is_asking:  # type: ignore[attr-defined]
            answers.append(await self.next())
        found = [answer for answer in answers if isinstance(answer, Found)]
        assert len(found) == len(answers) and {answer.number for answer in found} == {number}
        contents = [self.page(slot) for answer in found for slot in answer.slots]
        self.tell(EndFind(number))
        return contents, [tier for answer in found for tier in answer.tiers], found

    def purge(self) -> None:
        self.tell(Purge())

    async def ask(self, message: object) -> object:
        self.tell(message)
        return await self.next()

    def tell(self, message: object) -> None:
        self._writer.send([message])

    async def next(self) -> object:
        if not self._answers:
            async with asyncio.timeout(15.0):
                self._answers.extend(STORE_SERVER_CODEC.decode(await self._call.read()))
        return self._answers.popleft()

    def end_find(self) -> None:
        """Ends the last find."""
        self.tell(EndFind(self._last))

    def num_pinned(self) -> int:
        return self.store.stats().num_pinned

    @property
    def num_ready(self) -> int:
        return self.store.stats().num_ready


@asynccontextmanager
async def nodes(
    *names: str, num_slots: int = 64, page_bytes: int = 600_000, tls: ClusterTls | None = None
) -> AsyncIterator[list[Node]]:
    """Yields nodes that know each other."""
    page_format = PageFormat("model", page_bytes, "layout")
    all_nodes = [Node(name, num_slots, page_format, ClusterCredentials(TOKEN, tls)) for name in names]
    for node in all_nodes:
        await node.start()
    for node in all_nodes:
        node.tier.set_peers([other.peer for other in all_nodes if other is not node])
    try:
        yield all_nodes
    finally:
        for node in all_nodes:
            await node.stop()
            assert node.store.check_integrity() == ""


def chain(letter: str, num_pages: int) -> list[str]:
    return [f"{letter}{number}" for number in range(num_pages)]

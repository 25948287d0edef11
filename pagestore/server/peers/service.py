"""The store's answers to the stores of other nodes. Runs on the store's loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from tandem.messages import PageFormat
from tandem.pagestore.keys import KEY_BYTES
from tandem.pagestore.messages import Purge
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.peers.parts import MAX_FETCH_KEYS, MAX_LOOK_KEYS, PART_BYTES, page_digest
from tandem.pagestore.server.server import StoreServer
from tandem.v1 import store_pb2, store_pb2_grpc

# Fetches served at a time: each pins MAX_FETCH_KEYS pages at most.
MAX_FETCHES = 16
# Limit on a fetch, in seconds: a peer that does not read would pin the pages.
FETCH_S = 10.0


class PeerPages(store_pb2_grpc.PeerPagesServicer):
    def __init__(
        self, sessions: StoreServer, region: memoryview, hear_purges: Callable[[Sequence[bytes]], bool]
    ) -> None:
        """
        Args:
            region: all slots.
            hear_purges: takes names of purges, and returns whether the store must purge: one of them is new.
        """
        self._sessions = sessions
        self._region = region
        self._hear_purges = hear_purges
        self._num_fetches = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        store_pb2_grpc.add_PeerPagesServicer_to_server(self, server)

    async def Look(self, request: store_pb2.LookRequest, context: grpc.aio.ServicerContext) -> store_pb2.PageRun:
        if self._sessions.store is None:
            if request.purges:
                await self._sessions.purge()
            return store_pb2.PageRun()
        store = await self._checked(request, MAX_LOOK_KEYS, context)
        if self._hear_purges(request.purges):
            with self._sessions.peer_session(store) as session:
                session.ask(Purge())
        run = store.run_of(request.keys)
        if not run:
            return store_pb2.PageRun()
        return store_pb2.PageRun(
            parent=run[0].parent, namespace=run[0].namespace, identities=b"".join(page.identity for page in run)
        )

    async def Fetch(self, request: store_pb2.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        store = await self._checked(request, MAX_FETCH_KEYS, context)
        if self._num_fetches >= MAX_FETCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_FETCHES} fetches are under way")
        self._num_fetches += 1
        try:
            async with asyncio.timeout(FETCH_S):
                await self._send_pages(store, request.keys, request.page_format.page_bytes, context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the fetch took {FETCH_S:g} s")
        finally:
            self._num_fetches -= 1

    async def _send_pages(
        self, store: PageStore, keys: Sequence[bytes], page_bytes: int, context: grpc.aio.ServicerContext
    ) -> None:
        remaining = iter(keys)
        # The find pins the pages until the session is closed.
        with self._sessions.peer_session(store) as session:
            async for slot in session.find(keys):
                page = self._region[slot * page_bytes : (slot + 1) * page_bytes]
                digest = await asyncio.to_thread(page_digest, next(remaining), page)
                for start in range(0, page_bytes, PART_BYTES):
                    end = start + PART_BYTES
                    part = store_pb2.PagePart(content=bytes(page[start:end]))
                    if end >= page_bytes:
                        part.digest = digest
                    await context.write(part)

    async def _checked(self, request: Any, max_keys: int, context: grpc.aio.ServicerContext) -> PageStore:
        """Returns the store, or aborts the call."""
        keys = request.keys
        if len(keys) > max_keys or len(set(keys)) != len(keys) or any(len(key) != KEY_BYTES for key in keys):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"keys must be at most {max_keys} different ones of {KEY_BYTES} bytes"
            )
        wanted = request.page_format
        try:
            return self._sessions.store_of(
                PageFormat(wanted.model_fingerprint, wanted.page_bytes, wanted.layout), "the asking store"
            )
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise

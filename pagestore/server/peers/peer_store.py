"""Another node's page store, as asked by this one."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc

from tandem.messages import PageFormat, Peer
from tandem.pagestore.keys import KEY_BYTES
from tandem.pagestore.server.base import StoredPage
from tandem.pagestore.server.peers.parts import page_digest
from tandem.prefix import IDENTITY_BYTES
from tandem.repeat_limit import RepeatLimit
from tandem.rpc.calls import call_errors
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2, store_pb2_grpc, worker_pb2

logger = logging.getLogger(__name__)

# Limits on an answer, on the next part of a page, and on a fetch, in seconds.
LOOK_S = 0.2
PART_S = 1.0
FETCH_S = 8.0
# Pause after a failure, in seconds. It doubles with each further one.
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
# Fetches from one peer at a time.
MAX_FETCHES = 2


class BadPeerError(Exception):
    """The peer's answer is wrong."""


class PeerStore:
    """Calls one peer. After a failure it is left alone for a while, so a dead peer costs a deadline once.

    Attributes:
        purges: names of purges that the peer has not confirmed.
        fetches: held during a fetch.
    """

    def __init__(
        self, peer: Peer, page_format: PageFormat, credentials: ClusterCredentials, clock: Callable[[], float]
    ) -> None:
        self.purges: list[bytes] = []
        self.fetches = asyncio.Semaphore(MAX_FETCHES)
        self._peer = peer
        self._format = worker_pb2.PageFormat(
            model_fingerprint=page_format.model_fingerprint,
            page_bytes=page_format.page_bytes,
            layout=page_format.layout,
        )
        self._page_bytes = page_format.page_bytes
        self._metadata = credentials.metadata
        self._channel = credentials.open_channel(peer.address)
        self._stub = store_pb2_grpc.PeerPagesStub(self._channel)
        self._clock = clock
        self._pause_s = MIN_PAUSE_S
        self._paused_until = 0.0
        self._failures = RepeatLimit()

    @property
    def is_up(self) -> bool:
        """Whether it may be asked."""
        return self._clock() >= self._paused_until

    def failed(self, error: Exception) -> None:
        """Begins a pause."""
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error) or type(error).__name__
        if self._failures.allows(str(details)):
            logger.warning("the page store %s at %s: %s", self._peer.worker_id, self._peer.address, details)
        if self.is_up:
            # Calls that began before the pause fail for the same reason.
            self._paused_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def succeeded(self) -> None:
        self._pause_s = MIN_PAUSE_S
        self._failures.forget()

    async def look(self, keys: Sequence[bytes]) -> list[StoredPage]:
        """Returns the run of pages that the peer has. It has purged everything older than `purges`.

        Raises:
            grpc.RpcError, TimeoutError: the peer did not answer in time.
            ConnectionError: `close` was called.
            BadPeerError: the answer is wrong.
        """
        purges = list(self.purges)
        request = store_pb2.LookRequest(page_format=self._format, keys=keys, purges=purges)
        with call_errors():
            async with asyncio.timeout(LOOK_S):
                run = await self._stub.Look(request, metadata=self._metadata, timeout=LOOK_S)
        self.purges = [purge for purge in self.purges if purge not in purges]
        num_pages, rest = divmod(len(run.identities), IDENTITY_BYTES)
        if rest or num_pages > len(keys) or len(run.parent) not in (0, KEY_BYTES):
            raise BadPeerError(f"a run of {len(run.identities)} bytes for {len(keys)} keys")
        parents = (run.parent, *keys)
        return [
            StoredPage(
                keys[i], parents[i], run.identities[i * IDENTITY_BYTES : (i + 1) * IDENTITY_BYTES], run.namespace
            )
            for i in range(num_pages)
        ]

    async def fetch(self, keys: Sequence[bytes], slots: Sequence[memoryview]) -> AsyncGenerator[int, None]:
        """Reads a run of pages. Yields the index of each that has arrived whole; ends early if the peer has no more.

        Raises:
            grpc.RpcError, TimeoutError: the peer failed or is too slow.
            BadPeerError: a page is not what was asked for.
        """
        request = store_pb2.FetchRequest(page_format=self._format, keys=keys)
        call = self._stub.Fetch(request, metadata=self._metadata, timeout=FETCH_S)
        try:
            index = num_bytes = 0
            while (part := await self._next_part(call)) is not None:
                end = num_bytes + len(part.content)
                if index >= len(keys) or end > self._page_bytes or bool(part.digest) != (end == self._page_bytes):
                    raise BadPeerError(f"a part of {len(part.content)} bytes that fits no page")
                slots[index][num_bytes:end] = part.content
                num_bytes = end
                if part.digest:
                    if await asyncio.to_thread(page_digest, keys[index], slots[index]) != part.digest:
                        raise BadPeerError("a page whose content is not that of its digest")
                    yield index
                    index, num_bytes = index + 1, 0
            if num_bytes:
                raise BadPeerError("a page without its end")
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def _next_part(self, call: Any) -> Any:
        """Returns None at the end."""
        async with asyncio.timeout(PART_S):
            part = await call.read()
        return None if part is grpc.aio.EOF else part

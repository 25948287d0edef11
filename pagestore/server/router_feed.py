"""A store's streams to all routers, which learn from them what the store holds."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc

from tandem.messages import (
    CacheWasReset,
    Peer,
    Peers,
    RepeatPrefixes,
    ResetCache,
    StoreBeat,
    StoreJoin,
    Welcome,
)
from tandem.page_changes import PageChanges
from tandem.peer_union import PeerUnion
from tandem.repeat_limit import RepeatLimit
from tandem.rpc.batch_writer import BatchWriter, is_cancelled
from tandem.rpc.calls import read_first, reason_of
from tandem.rpc.codec import ROUTER_CODEC, STORE_REPORT_CODEC
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.prefix_feed import CacheAccount, PrefixFeed
from tandem.v1 import store_pb2_grpc

logger = logging.getLogger(__name__)

# Delay of the routers' knowledge, in seconds.
INTERVAL_S = 0.1
BEAT_INTERVAL_S = 0.5
RETRY_DELAY_S = 0.2
WELCOME_TIMEOUT_S = 5.0
# A router adds identities of stores one by one, and passes on no tokens meanwhile.
PART_IDENTITIES = 512


async def _purge_nothing() -> None:
    pass


class RouterFeed:
    """Keeps every router informed. Belongs to the asyncio loop that drives the store."""

    def __init__(
        self,
        addresses: Sequence[str],
        join: StoreJoin,
        credentials: ClusterCredentials,
        take_changes: Callable[[], Mapping[int, PageChanges]],
        beat: Callable[[], StoreBeat] = StoreBeat,
        on_peers: Callable[[Sequence[Peer]], None] = lambda peers: None,
        purge: Callable[[], Awaitable[None]] = _purge_nothing,
    ) -> None:
        """
        Args:
            addresses: the routers' ports for workers. A restarted router keeps its address.
            take_changes: returns the store's changes since its last call, by tier.
            beat: returns the store's state.
            on_peers: receives the stores of other nodes that any router names.
            purge: purges the store; returns when that outlives its process.
        """
        self._take_changes = take_changes
        self._on_peers = on_peers
        self._account = CacheAccount(PART_IDENTITIES)
        self._union = PeerUnion(time.monotonic)
        self._peers: tuple[Peer, ...] = ()
        self._streams = [
            _RouterStream(address, join, credentials, self._account, beat, self._union, purge) for address in addresses
        ]

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.run())
            while True:
                self.tell_changes()
                if (peers := self._union.peers()) != self._peers:
                    self._peers = peers
                    self._on_peers(peers)
                await asyncio.sleep(INTERVAL_S)

    def tell_changes(self) -> None:
        changes = self._take_changes()
        # The account first: a router that starts over with one tier gets the others' changes with it.
        for tier, change in changes.items():
            self._account.apply(change, tier)
        for tier, change in changes.items():
            stored, removed = b"".join(change.stored), b"".join(change.removed)
            for stream in self._streams:
                stream.tell_changes(stored, removed, tier)
        for stream in self._streams:
            stream.catch_up()


class _RouterStream:
    """Keeps a stream to one router, reopened whenever it ends."""

    def __init__(
        self,
        address: str,
        join: StoreJoin,
        credentials: ClusterCredentials,
        account: CacheAccount,
        beat: Callable[[], StoreBeat],
        union: PeerUnion,
        purge: Callable[[], Awaitable[None]],
    ) -> None:
        self._address = address
        self._join = join
        self._credentials = credentials
        self._account = account
        self._beat = beat
        self._union = union
        self._purge = purge
        # A purge outlives the stream that asked for it.
        self._purges: set[asyncio.Task[None]] = set()
        self._failures = RepeatLimit()
        # None while the router has not asked for prefixes.
        self._feed: PrefixFeed | None = None

    def tell_changes(self, stored: bytes, removed: bytes, tier: int) -> None:
        if self._feed is not None:
            self._feed.tell_changes(stored, removed, tier)

    def catch_up(self) -> None:
        if self._feed is not None:
            self._feed.catch_up()

    async def run(self) -> None:
        while True:
            await self._run_once()
            await asyncio.sleep(RETRY_DELAY_S)

    async def _run_once(self) -> None:
        writer = BatchWriter(STORE_REPORT_CODEC)
        writer.send([self._join])
        beats: asyncio.Task[None] | None = None
        try:
            async with self._credentials.open_channel(self._address) as channel:
                stub = store_pb2_grpc.StoreReportsStub(channel)
                call = stub.Report(writer.batches(), metadata=self._credentials.metadata)
                first = await read_first(call, WELCOME_TIMEOUT_S)
                self._receive(first, writer)
                self._failures.forget()
                beats = asyncio.create_task(self._send_beats(writer))
                while (batch := await call.read()) is not grpc.aio.EOF:
                    self._receive(batch, writer)
                logger.info("the router at %s ended the store's stream", self._address)
        except (grpc.RpcError, TimeoutError, ValueError, ConnectionError) as error:
            details = reason_of(error)
            if self._failures.allows(details):
                logger.info("store's stream to the router at %s: %s", self._address, details)
        except asyncio.CancelledError:
            # gRPC cancels a call with unwritable messages. Only a cancellation of this task ends it.
            if is_cancelled():
                raise
        finally:
            self._feed = None
            self._union.forget_router(self._address)
            writer.close()
            if beats is not None:
                beats.cancel()

    def _receive(self, batch: object, writer: BatchWriter) -> None:
        for message in ROUTER_CODEC.decode(batch):
            match message:
                case Welcome():
                    if message.wants_prefixes:
                        self._feed = PrefixFeed(self._account, writer)
                        self._feed.catch_up()
                case Peers():
                    self._union.set_named(self._address, message.peers)
                case ResetCache():
                    task = asyncio.create_task(self._reset(message.number, writer))
                    self._purges.add(task)
                    task.add_done_callback(self._purges.discard)
                case RepeatPrefixes():
                    if self._feed is not None:
                        self._feed.begin_anew()
                case _:
                    raise ValueError(f"unexpected {message!r:.100} from the router")

    async def _reset(self, number: int, writer: BatchWriter) -> None:
        await self._purge()
        writer.send([CacheWasReset(number)])

    async def _send_beats(self, writer: BatchWriter) -> None:
        while True:
            # Beats behind unread messages would only pile up.
            if writer.num_taken == writer.num_sent:
                writer.send([self._beat()])
            await asyncio.sleep(BEAT_INTERVAL_S)

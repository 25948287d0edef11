"""A worker's end of the control stream to one router."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import grpc

from tandem.lifecycle import now_ns
from tandem.messages import (
    Abort,
    Adapters,
    Admit,
    CheckAdapter,
    ClockProbe,
    ClockReply,
    Heartbeat,
    Hello,
    LinkState,
    Move,
    NamespaceOwners,
    Peers,
    Prefill,
    Recall,
    RepeatPrefixes,
    ResetCache,
    Welcome,
    WorkerMessage,
)
from tandem.repeat_limit import RepeatLimit
from tandem.request_ids import router_of
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.calls import call_errors, read_first, reason_of
from tandem.rpc.codec import ROUTER_CODEC, WORKER_CODEC
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.prefix_feed import CacheAccount, PrefixFeed
from tandem.v1 import worker_pb2_grpc
from tandem.worker.adapter_exchange import AdapterExchange
from tandem.worker.events import Event, FromRouter, RouterLost
from tandem.worker.heartbeat_feed import HeartbeatFeed
from tandem.worker.records import RecordKeeper

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.2
WELCOME_TIMEOUT_S = 5.0


class RefusedError(ConnectionError):
    """A router refuses this worker for good."""


class ControlClient:
    """Keeps a Control stream to a router, reopened whenever it ends. Runs on the asyncio thread.

    Attributes:
        router: incarnation of the router that welcomed this worker; "" while not connected.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        credentials: ClusterCredentials,
        heartbeat: Callable[[], Heartbeat | None],
        heartbeat_interval_s: float,
        records: RecordKeeper,
        account: CacheAccount,
        post: Callable[[Event], None],
        links: Callable[[], Iterable[LinkState]],
        adapters: AdapterExchange,
        on_adapters: Callable[[str, Adapters], None],
        on_peers: Callable[[str, Peers], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """
        Args:
            heartbeat: None: be silent, and do not connect again.
            links: returns the links that are up, which this worker tells at every Welcome.
            on_adapters: receives the router's address and its names of adapters.
            on_peers: receives the router's address and the decode workers it names.
            on_connected: called at every Welcome.
            on_lost: receives the address when a welcomed stream ends.
        """
        self.address = address
        self.router = ""
        self._hello = hello
        self._credentials = credentials
        self._heartbeat = heartbeat
        self._heartbeat_interval_s = heartbeat_interval_s
        self._records = records
        self._account = account
        self._post = post
        self._links = links
        self._adapters = adapters
        self._on_adapters = on_adapters
        self._on_peers = on_peers
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._failures = RepeatLimit()
        self._writer: BatchWriter | None = None
        # None if the router wants no cached prefixes.
        self._prefixes: PrefixFeed | None = None

    def send(self, messages: Sequence[WorkerMessage]) -> None:
        """Sends to the router, or drops the messages while not connected."""
        if self._writer is not None and self.router:
            self._writer.send(messages)

    def tell_changes(self, stored: bytes, removed: bytes) -> None:
        if self._prefixes is not None:
            self._prefixes.tell_changes(stored, removed)

    def catch_up(self) -> None:
        """Sends pending prefixes to a router that was too slow."""
        if self._prefixes is not None:
            self._prefixes.catch_up()

    async def run(self) -> None:
        """Runs until cancelled. Raises RefusedError if the router refuses this worker."""
        while True:
            # A router would give work to a worker that cannot serve.
            if self._heartbeat() is not None:
                await self._run_once()
            await asyncio.sleep(RETRY_DELAY_S)

    async def _run_once(self) -> None:
        writer = BatchWriter(WORKER_CODEC)
        self._begin_stream(writer)
        beats: asyncio.Task[None] | None = None
        try:
            with call_errors():
                async with self._credentials.open_channel(self.address) as channel:
                    stub = worker_pb2_grpc.ClusterStub(channel)
                    call = stub.Control(writer.batches(), metadata=self._credentials.metadata)
                    first = await read_first(call, WELCOME_TIMEOUT_S)
                    self._receive(ROUTER_CODEC.decode(first))
                    beats = asyncio.create_task(self._beat(writer))
                    while (batch := await call.read()) is not grpc.aio.EOF:
                        self._receive(ROUTER_CODEC.decode(batch))
                    logger.info("the router ended the control stream: %s", await call.details() or "no reason given")
        except (grpc.RpcError, TimeoutError, ValueError, ConnectionError) as error:
            details = reason_of(error)
            if isinstance(error, grpc.aio.AioRpcError) and error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise RefusedError(details) from error
            self._log_failure(details)
        finally:
            writer.close()
            if beats is not None:
                beats.cancel()
            self._end_stream()

    def _log_failure(self, reason: str) -> None:
        if self._failures.allows(reason):
            logger.info("control stream to %s: %s", self.address, reason)

    def _begin_stream(self, writer: BatchWriter) -> None:
        self._writer = writer
        writer.send([self._hello])

    def _end_stream(self) -> None:
        """Every end of a stream goes through this method."""
        router, self.router = self.router, ""
        self._prefixes = None
        if router:
            self._post(RouterLost(router))
            self._on_lost(self.address)

    def _receive(self, messages: Sequence[object]) -> None:
        received_ns = now_ns()
        for message in messages:
            match message:
                case Welcome():
                    self.router = message.router_incarnation
                    self.send([*self._adapters.greeting(), *self._links()])
                    if message.wants_prefixes and self._writer is not None:
                        self._prefixes = PrefixFeed(self._account, self._writer)
                        self._prefixes.catch_up()
                    self._failures.forget()
                    self._on_connected()
                    self._post(FromRouter(message))
                case Peers():
                    self._on_peers(self.address, message)
                case Admit() | Prefill() if router_of(message.request_id) == self.router:
                    self._records.begin(message)
                    self._post(FromRouter(message, received_ns))
                case Abort() | Move() if router_of(message.request_id) == self.router:
                    self._post(FromRouter(message))
                case ResetCache() | NamespaceOwners():
                    self._post(FromRouter(message))
                case RepeatPrefixes():
                    if self._prefixes is not None:
                        self._prefixes.begin_anew()
                case Recall():
                    self.send([self._records.recall(message)])
                case CheckAdapter():
                    self._adapters.check(message, self.send)
                case Adapters():
                    self._on_adapters(self.address, message)
                case ClockProbe():
                    self.send([ClockReply(message.sent_ns, received_ns, now_ns())])
                case _:
                    raise ValueError(f"unexpected {message!r} from router {self.router}")

    async def _beat(self, writer: BatchWriter) -> None:
        feed = HeartbeatFeed()
        while True:
            if (heartbeat := self._heartbeat()) is not None:
                writer.send([feed.next(heartbeat)])
            self.catch_up()
            await asyncio.sleep(self._heartbeat_interval_s)

"""The store's side of sessions over gRPC, and direct questions. Runs on the asyncio thread, as the store does."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc
from prometheus_client import CollectorRegistry, generate_latest

from tandem.exit_watch import ExitWatches
from tandem.messages import PROTOCOL_VERSION, PageFormat
from tandem.pagestore.messages import (
    STORE_CLIENT_CODEC,
    STORE_SERVER_CODEC,
    Find,
    Found,
    StoreClientMessage,
    StoreHello,
    StoreRefused,
    StoreServerMessage,
)
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.stats import StoreStats
from tandem.repeat_limit import RepeatLimit
from tandem.rpc.batch_writer import BatchWriter
from tandem.v1 import store_pb2, store_pb2_grpc, worker_pb2

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
# Limit on a purge, in seconds: a disk that hangs for longer than a tier waits for it.
PURGE_TIMEOUT_S = 15.0


async def _purge_nothing() -> None:
    pass


class Receiver(Protocol):
    """Gets a session's messages. `close` ends it."""

    def send(self, messages: Sequence[StoreServerMessage], /) -> None: ...
    def close(self) -> None: ...


class PeerSession:
    """A session for the store of another node."""

    def __init__(self, receive: Callable[[Sequence[StoreClientMessage]], None]) -> None:
        self._receive = receive
        # None: the session is over.
        self._answers: asyncio.Queue[Found | None] = asyncio.Queue()

    def send(self, messages: Sequence[StoreServerMessage]) -> None:
        for message in messages:
            if isinstance(message, Found):
                self._answers.put_nowait(message)

    def close(self) -> None:
        self._answers.put_nowait(None)

    def ask(self, message: StoreClientMessage) -> None:
        self._receive([message])

    async def find(self, keys: Sequence[bytes]) -> AsyncIterator[int]:
        """Yields the slots of the run as its pages arrive. They are pinned until the session ends. Called once."""
        self.ask(Find(1, tuple(keys)))
        while (found := await self._answers.get()) is not None:
            for slot in found.slots:
                yield slot
            if not found.num_coming:
                return


class StoreServer(store_pb2_grpc.PageStoreServicer):
    """
    Attributes:
        store: None before the first session, which decides the format of pages.
        latest_stats: of the store, for other threads; replaced as a whole.
        region_id: of the store's region; sessions of another are refused.
        refusal: why all sessions are refused; "": they are not.
    """

    def __init__(
        self,
        make_store: Callable[[PageFormat], PageStore],
        on_crash: Callable[[], None],
        purge_unopened: Callable[[], Awaitable[None]] = _purge_nothing,
    ) -> None:
        """
        Args:
            make_store: raises ValueError if it cannot; the message refuses the session.
            on_crash: called after an error that leaves slots in an unknown state.
            purge_unopened: purges what a store would find if it were made now. Raises OSError: it may still find pages.
        """
        self.store: PageStore | None = None
        self.latest_stats: StoreStats | None = None
        self.region_id = self.refusal = ""
        self._make_store = make_store
        self._on_crash = on_crash
        self._purge_unopened = purge_unopened
        self._page_format: PageFormat | None = None
        self._writers: dict[str, Receiver] = {}
        self._poll_now = asyncio.Event()
        self._polled = asyncio.Event()
        # Session of each incarnation of a worker.
        self._sessions: dict[str, str] = {}
        self._refusals = RepeatLimit()

    def add_to(self, server: grpc.aio.Server) -> None:
        store_pb2_grpc.add_PageStoreServicer_to_server(self, server)

    async def run(self, poll_interval_s: float) -> None:
        """Polls the store until cancelled. Every error is a crash: without polls no slot of a dead worker returns."""
        try:
            while True:
                if self.store is not None:
                    self.store.poll()
                    self._deliver(self.store)
                    self.latest_stats = self.store.stats()
                    self._polled.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(poll_interval_s):
                        await self._poll_now.wait()
                self._poll_now.clear()
        except Exception:
            self._crash()
            raise

    def poll_soon(self) -> None:
        """Polls before the interval is over. Called on the loop."""
        self._poll_now.set()

    async def purge(self) -> None:
        """Purges all pages. Returns when no end of a process or a machine can undo that. `run` runs meanwhile.

        Raises OSError: a later life of the store may find pages on the disk. Memory has none.
        """
        try:
            async with asyncio.timeout(PURGE_TIMEOUT_S):
                await self._purge()
        except TimeoutError:
            raise OSError(f"the disk has not recorded the purge within {PURGE_TIMEOUT_S:.0f} s") from None

    async def _purge(self) -> None:
        if self.store is None:
            await self._purge_unopened()
        if (store := self.store) is not None:
            with self._crash_on_errors():
                store.purge()
            while store.is_purging:
                self._polled.clear()
                await self._polled.wait()
            self._deliver(store)
            if store.purge_failure:
                raise OSError(store.purge_failure)

    def stop(self) -> None:
        for writer in self._writers.values():
            writer.close()

    @contextlib.contextmanager
    def peer_session(self, store: PageStore) -> Iterator[PeerSession]:
        """Opens a session for the store of another node until the context ends."""
        name = f"peer {uuid.uuid4().hex}"
        session = PeerSession(lambda messages: self._receive(store, name, messages))
        store.open_peer_session(name)
        self._writers[name] = session
        try:
            yield session
        finally:
            self._close(store, name)

    def store_of(self, page_format: PageFormat, whose: str) -> PageStore:
        """Returns the store of these pages. Raises ValueError if there is none.

        Args:
            whose: owner of the format, for the message.
        """
        if self.store is None or self._page_format is None:
            raise ValueError("the page store has no pages yet")
        if mismatch := page_format.mismatch(self._page_format, whose, "the page store"):
            raise ValueError(mismatch)
        return self.store

    async def Session(self, batches: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                (hello, *rest) = STORE_CLIENT_CODEC.decode(await anext(aiter(batches)))
        except (StopAsyncIteration, TimeoutError, ValueError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with StoreHello")
            return
        if not isinstance(hello, StoreHello):
            yield STORE_SERVER_CODEC.encode([StoreRefused("a session begins with StoreHello")])
            return
        try:
            store = self._store_for(hello)
        except ValueError as error:
            refusal = f"session of {hello.worker_id} refused: {error}"
            # The worker tries again every few seconds.
            if self._refusals.allows(refusal):
                logger.warning(refusal)
            yield STORE_SERVER_CODEC.encode([StoreRefused(str(error))])
            return
        # The hello says that the copies of the worker's earlier session are over, which may not have ended here.
        self._close(store, self._sessions.get(hello.incarnation, ""))
        # No await between the opening and `try`: every opened session is closed.
        session = self._sessions[hello.incarnation] = uuid.uuid4().hex
        writer = BatchWriter(STORE_SERVER_CODEC)
        self._writers[session] = writer
        reader: asyncio.Task[None] | None = None
        try:
            watches = ExitWatches.of([hello.pid, *hello.follower_pids])
            store.open_session(session, hello, watches.are_gone)
            self._receive(store, session, rest)
            reader = asyncio.create_task(self._read(store, session, hello.worker_id, batches, writer))
            async for batch in writer.batches():
                yield batch
        except ValueError as error:
            logger.warning("session of %s: %s", hello.worker_id, error)
        finally:
            if reader is not None:
                reader.cancel()
            if self._sessions.get(hello.incarnation) == session:
                del self._sessions[hello.incarnation]
            self._close(store, session)

    async def _read(
        self, store: PageStore, session: str, worker_id: str, batches: AsyncIterator[Any], writer: BatchWriter
    ) -> None:
        try:
            async for batch in batches:
                self._receive(store, session, STORE_CLIENT_CODEC.decode(batch))
        except (grpc.RpcError, ValueError) as error:
            logger.warning("session of %s: %s", worker_id, error)
        finally:
            writer.close()

    def _receive(self, store: PageStore, session: str, messages: Sequence[StoreClientMessage]) -> None:
        """Raises ValueError: a message violates the protocol."""
        with self._crash_on_errors():
            for message in messages:
                if session in self._writers:
                    store.receive(session, message)
        self._deliver(store)

    def _deliver(self, store: PageStore) -> None:
        for session, messages in store.take_outgoing().items():
            if session in self._writers:
                self._writers[session].send(messages)

    def _close(self, store: PageStore, session: str) -> None:
        """Every end of a session goes through this method, once."""
        if (writer := self._writers.pop(session, None)) is not None:
            writer.close()
            store.close_session(session)

    @contextlib.contextmanager
    def _crash_on_errors(self) -> Iterator[None]:
        """Passes ValueError on, before which the store has not changed."""
        try:
            yield
        except ValueError:
            raise
        except Exception:
            self._crash()
            raise

    def _crash(self) -> None:
        logger.exception("the page store failed")
        self._on_crash()

    def _store_for(self, hello: StoreHello) -> PageStore:
        """Raises ValueError: the session is refused."""
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ValueError(f"protocol version {hello.protocol_version} is not {PROTOCOL_VERSION}")
        if self.refusal:
            raise ValueError(self.refusal)
        if hello.region_id != self.region_id:
            raise ValueError("the worker maps memory of an earlier store of this node; restart the worker")
        if self.store is None or self._page_format is None:
            self.store, self._page_format = self._make_store(hello.page_format), hello.page_format
        store = self.store_of(hello.page_format, "the worker")
        store.check_attempt(hello)
        return store


class StoreAdmin(store_pb2_grpc.StoreAdminServicer):
    def __init__(self, server: StoreServer, registry: CollectorRegistry) -> None:
        self._server = server
        self._registry = registry

    def add_to(self, server: grpc.aio.Server) -> None:
        store_pb2_grpc.add_StoreAdminServicer_to_server(self, server)

    async def CheckIntegrity(self, request: Any, context: grpc.aio.ServicerContext) -> store_pb2.StoreIntegrityReport:
        store = self._server.store
        return store_pb2.StoreIntegrityReport(violation=store.check_integrity() if store is not None else "")

    async def ReadMetrics(self, request: Any, context: grpc.aio.ServicerContext) -> worker_pb2.WorkerMetrics:
        # It takes a millisecond: keep it off the event loop.
        return worker_pb2.WorkerMetrics(text=await asyncio.to_thread(generate_latest, self._registry))

"""A session over a real server and store; the test acts as the engine thread."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import pytest

from tandem.messages import PROTOCOL_VERSION, PageFormat
from tandem.pagestore.client import session
from tandem.pagestore.client.events import FromStore, StoreClosed, StoreOpened
from tandem.pagestore.client.session import StoreSession
from tandem.pagestore.messages import Find, Found, Put, PutGranted, StoreHello
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.server import StoreServer
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2_grpc
from tandem.worker.events import Event

T = TypeVar("T", bound=Event)
TOKEN = "token"
HELLO = StoreHello(PROTOCOL_VERSION, "worker-0", "life", 1, PageFormat("model", 64, "fake"))
PUT = Put(1, "", b"", (b"k" * 32,), (b"identity",))
FIND = Find(2, "", (b"k" * 32,))


class Store:
    """A store that can end and come back at its address."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:0"
        self.sessions: StoreServer | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = new_server([cluster_auth(TOKEN)], reuse_ports=True)
        self.address = bind(self._server, "127.0.0.1", int(self.address.rpartition(":")[2]))
        self.sessions = StoreServer(lambda page_format: PageStore(4, lambda: 0.0), lambda: None)
        self.sessions.add_to(self._server)
        await self._server.start()

    async def end(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None


class Engine:
    """The engine thread's inbox."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def expect(self, kind: type[T]) -> T:
        async with asyncio.timeout(10.0):
            event = await self._events.get()
        assert isinstance(event, kind)
        return event

    @property
    def is_idle(self) -> bool:
        return self._events.empty()


@asynccontextmanager
async def running(store: Store, engine: Engine, token: str = TOKEN, hello: Any = HELLO) -> AsyncIterator[StoreSession]:
    kept = StoreSession(store.address, hello, ClusterCredentials(token), engine.post)
    task = asyncio.create_task(kept.run())
    try:
        yield kept
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.end()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RETRY_DELAY_S", 0.02)


def test_a_worker_says_that_it_may_copy_before_it_says_hello() -> None:
    async def scenario() -> None:
        store, engine, begun = Store(), Engine(), 0

        def begin() -> None:
            nonlocal begun
            begun += 1
            assert engine.is_idle
            if begun == 1:
                raise ConnectionRefusedError("no holder")

        await store.start()
        kept = StoreSession(store.address, HELLO, ClusterCredentials(TOKEN), engine.post, begin)
        task = asyncio.create_task(kept.run())
        assert (await engine.expect(StoreOpened)).num_slots == 4 and begun == 2
        await store.end()
        await engine.expect(StoreClosed)
        await store.start()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.end()
        assert begun == 2, "once for all sessions"

    asyncio.run(scenario())


def test_messages_go_both_ways_within_an_epoch() -> None:
    async def scenario() -> None:
        store, engine = Store(), Engine()
        await store.start()
        async with running(store, engine) as kept:
            opened = await engine.expect(StoreOpened)
            assert opened.num_slots == 4
            kept.send(opened.epoch, [PUT, FIND])
            for kind in (PutGranted, Found):
                event = await engine.expect(FromStore)
                assert event.epoch == opened.epoch and isinstance(event.message, kind)
            # Messages of another life have no effect.
            kept.send("another epoch", [PUT])
            kept.send(opened.epoch, [Find(3, "", FIND.keys)])
            assert isinstance((await engine.expect(FromStore)).message, Found)
        closed = await engine.expect(StoreClosed)
        assert closed.epoch == opened.epoch

    asyncio.run(scenario())


def test_the_next_session_waits_until_copies_have_ended() -> None:
    async def scenario() -> None:
        store, engine = Store(), Engine()
        await store.start()
        async with running(store, engine) as kept:
            first = await engine.expect(StoreOpened)
            await store.end()
            closed = await engine.expect(StoreClosed)
            assert closed.epoch == first.epoch
            await store.start()
            await asyncio.sleep(0.3)
            assert engine.is_idle and store.sessions is not None and store.sessions.store is None
            closed.when_quiet()
            second = await engine.expect(StoreOpened)
            assert second.epoch != first.epoch
            # A message that the engine thread sent before it heard of the end.
            kept.send(first.epoch, [PUT])
            kept.send(second.epoch, [FIND])
            assert isinstance((await engine.expect(FromStore)).message, Found)

    asyncio.run(scenario())


def test_the_next_session_waits_for_copies_after_a_cancelled_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC cancels a call whose messages it cannot write."""
    calls: list[Any] = []

    class Stub(store_pb2_grpc.PageStoreStub):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            begin = self.Session

            def keep(*args: Any, **kwargs: Any) -> Any:
                calls.append(begin(*args, **kwargs))
                return calls[-1]

            self.Session = keep

    async def scenario() -> None:
        monkeypatch.setattr(store_pb2_grpc, "PageStoreStub", Stub)
        store, engine = Store(), Engine()
        await store.start()
        async with running(store, engine):
            await engine.expect(StoreOpened)
            calls[0].cancel()
            closed = await engine.expect(StoreClosed)
            await asyncio.sleep(0.3)
            assert engine.is_idle and len(calls) == 1
            closed.when_quiet()
            await engine.expect(StoreOpened)

    asyncio.run(scenario())


def test_an_unexpected_error_ends_the_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(session, "MAX_RETRY_DELAY_S", 0.02)
        store, engine = Store(), Engine()
        await store.start()
        async with running(store, engine) as kept:
            first = await engine.expect(StoreOpened)
            with monkeypatch.context() as planted:
                planted.setattr(kept, "_pass_on", lambda messages: 1 / 0)
                kept.send(first.epoch, [PUT])
                closed = await engine.expect(StoreClosed)
            await asyncio.sleep(0.1)
            assert engine.is_idle
            closed.when_quiet()
            await engine.expect(StoreOpened)
            assert kept._hello.attempt == 2
            with monkeypatch.context() as planted:
                planted.setattr(kept, "_run_once", lambda: 1 / 0)
                await store.end()
                (await engine.expect(StoreClosed)).when_quiet()
                await asyncio.sleep(0.1)
            await store.start()
            await engine.expect(StoreOpened)

    asyncio.run(scenario())


def test_a_worker_without_a_store_tries_again_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store, engine = Store(), Engine()
        await store.start()
        await store.end()
        with caplog.at_level(logging.WARNING):
            async with running(store, engine):
                await asyncio.sleep(0.5)
                assert engine.is_idle
                await store.start()
                await engine.expect(StoreOpened)
        lines = [r.getMessage() for r in caplog.records if r.name == "tandem.pagestore.client.session"]
        assert len(lines) >= 1 and lines[0].startswith(f"no page store at {store.address}, serving without it: ")
        assert len(set(lines)) == len(lines)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("token", "hello", "reason"),
    [
        ("another", HELLO, "the cluster token is missing or wrong"),
        (TOKEN, StoreHello(PROTOCOL_VERSION + 1, "w", "life", 1, HELLO.page_format), "refused: protocol version"),
    ],
)
def test_a_refusal_is_logged(token: str, hello: StoreHello, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        store, engine = Store(), Engine()
        await store.start()
        async with running(store, engine, token, hello):
            async with asyncio.timeout(10.0):
                while reason not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert engine.is_idle

    asyncio.run(scenario())

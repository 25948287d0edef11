"""Sessions of raw clients with a real server and store."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import pytest
from prometheus_client import generate_latest

from tandem.exit_watch import SETTLE_S
from tandem.messages import PROTOCOL_VERSION, PageFormat
from tandem.pagestore.messages import (
    HOST,
    NO_ROOM,
    STORE_CLIENT_CODEC,
    STORE_SERVER_CODEC,
    Find,
    Found,
    Put,
    PutGranted,
    StoreHello,
    StoreRefused,
    StoreWelcome,
    Wrote,
)
from tandem.pagestore.server.metrics import store_registry
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.server import StoreAdmin, StoreServer
from tandem.rpc.auth import cluster_auth, cluster_metadata
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.channel import bind, new_server, open_channel
from tandem.v1 import store_pb2_grpc, worker_pb2

T = TypeVar("T")
TOKEN = "token"
FORMAT = PageFormat("model", 64, "fake")
PUT = Put(1, "", b"", (b"k" * 32,), (b"identity",))
FIND = Find(2, (b"k" * 32,))


def hello(incarnation: str = "life", *, pid: int = 1, page_format: PageFormat = FORMAT) -> StoreHello:
    return StoreHello(PROTOCOL_VERSION, "worker-0", incarnation, pid, page_format)


class Served:
    """A server with its store of `num_slots`.

    Attributes:
        num_crashes: errors of the store.
        polls: the task that polls it.
    """

    polls: "asyncio.Task[None]"

    def __init__(self, num_slots: int) -> None:
        self.num_crashes = 0
        self.num_slots = num_slots
        self.sessions = StoreServer(self._make, self._crash)
        self.address = ""

    def _make(self, page_format: PageFormat) -> PageStore:
        if page_format.model_fingerprint == "unwanted":
            raise ValueError("this model is unwanted")
        return PageStore(self.num_slots, lambda: 0.0)

    def _crash(self) -> None:
        self.num_crashes += 1


@asynccontextmanager
async def served(num_slots: int = 4) -> AsyncIterator[Served]:
    one = Served(num_slots)
    server = new_server([cluster_auth(TOKEN)])
    one.address = bind(server, "127.0.0.1", 0)
    one.sessions.add_to(server)
    registry = store_registry("store-0", lambda: one.sessions.latest_stats, lambda: None, 0)
    StoreAdmin(one.sessions, registry).add_to(server)
    await server.start()
    one.polls = asyncio.create_task(one.sessions.run(0.01))
    try:
        yield one
    finally:
        one.polls.cancel()
        one.sessions.stop()
        await server.stop(0.0)


class Client:
    """One stream. Attributes: received: messages that `read` has not returned yet."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self.writer = BatchWriter(STORE_CLIENT_CODEC)
        stub = store_pb2_grpc.PageStoreStub(channel)
        self.call = stub.Session(self.writer.batches(), metadata=cluster_metadata(token))
        self.received: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.writer.send(messages)

    async def read(self) -> Any:
        """Returns the next message; None at the end."""
        while not self.received:
            async with asyncio.timeout(10.0):
                batch = await self.call.read()
            if batch is grpc.aio.EOF:
                return None
            self.received = STORE_SERVER_CODEC.decode(batch)
        return self.received.pop(0)

    async def expect(self, kind: type[T]) -> T:
        message = await self.read()
        assert isinstance(message, kind)
        return message


@asynccontextmanager
async def client(address: str, *messages: Any, token: str = TOKEN) -> AsyncIterator[Client]:
    async with open_channel(address) as channel:
        one = Client(channel, token)
        one.send(*messages)
        yield one


async def opened(address: str, *messages: Any) -> Sequence[Any]:
    async with client(address, hello(), *messages) as one:
        return [await one.read() for _ in range(1 + len(messages))]


def test_a_page_that_one_session_wrote_is_found_by_another() -> None:
    async def scenario() -> None:
        async with served() as store, client(store.address, hello("a"), PUT) as writer:
            welcome = await writer.expect(StoreWelcome)
            assert welcome.num_slots == 4 and welcome.epoch == store.sessions.store.epoch  # type: ignore[union-attr]
            granted = await writer.expect(PutGranted)
            writer.send(Wrote(granted.slots, granted.generations), FIND)
            assert await writer.read() == Found(2, 0, granted.slots, granted.generations, (HOST,), 0)
            async with client(store.address, hello("b"), FIND) as reader:
                assert (await reader.read()).epoch == welcome.epoch
                assert (await reader.read()).slots == granted.slots

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (StoreHello(PROTOCOL_VERSION + 1, "w", "life", 1, FORMAT), f"protocol version {PROTOCOL_VERSION + 1} is not"),
        (StoreHello(PROTOCOL_VERSION, "w", "life", 1, FORMAT, region_id="lost"), "maps memory of an earlier store"),
        (hello(page_format=PageFormat("unwanted", 64, "fake")), "this model is unwanted"),
        (FIND, "a session begins with StoreHello"),
    ],
)
def test_what_opens_no_session_is_refused(first: Any, reason: str) -> None:
    async def scenario() -> None:
        async with served() as store, client(store.address, first) as one:
            refused = await one.expect(StoreRefused)
            assert reason in refused.reason and await one.read() is None
            # The next worker may open the store.
            assert isinstance((await opened(store.address))[0], StoreWelcome)

    asyncio.run(scenario())


def test_a_refused_worker_that_tries_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served() as store:
            for _ in range(3):
                async with client(store.address, replace(hello(), region_id="lost")) as one:
                    await one.expect(StoreRefused)

    asyncio.run(scenario())
    assert [record.getMessage().partition(":")[0] for record in caplog.records if "refused" in record.getMessage()] == [
        "session of worker-0 refused"
    ]


def test_a_hello_that_was_overtaken_ends_no_session() -> None:
    async def scenario() -> None:
        async with served() as store, client(store.address, replace(hello(), attempt=2)) as one:
            await one.expect(StoreWelcome)
            async with client(store.address, replace(hello(), attempt=1)) as late:
                assert "comes after attempt 2" in (await late.expect(StoreRefused)).reason
            one.send(PUT)
            await one.expect(PutGranted)

    asyncio.run(scenario())


def test_the_first_session_decides_the_format() -> None:
    async def scenario() -> None:
        async with served() as store:
            await opened(store.address)
            async with client(store.address, hello(page_format=PageFormat("model", 128, "fake"))) as one:
                refused = await one.expect(StoreRefused)
                assert refused.reason.startswith(
                    "pages differ: fake of 128 bytes at the worker, fake of 64 at the page"
                )

    asyncio.run(scenario())


def test_strangers_are_refused() -> None:
    async def scenario() -> None:
        # A message on its way when the refusal comes would end the call as a failure of gRPC's.
        async with served() as store, client(store.address, token="another") as one:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert store.sessions.store is None

    asyncio.run(scenario())


def test_a_violation_of_the_protocol_ends_only_its_session() -> None:
    async def scenario() -> None:
        async with served() as store, client(store.address, hello("a")) as other:
            await other.read()
            async with client(store.address, hello("b")) as one:
                await one.expect(StoreWelcome)
                one.send(Find(1, (b"short",)))
                assert await one.read() is None
            other.send(FIND)
            await other.expect(Found)
            assert store.num_crashes == 0

    asyncio.run(scenario())


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_slots_of_a_writer_stay_until_it_is_gone_or_speaks_again(process: "subprocess.Popen[bytes]") -> None:
    async def scenario() -> None:
        other_put = Put(1, "", b"", (b"l" * 32,), (b"identity",))
        async with served(num_slots=1) as store:
            async with client(store.address, hello("a", pid=process.pid), PUT) as writer:
                await writer.expect(StoreWelcome)
                assert (await writer.expect(PutGranted)).slots == (0,)
            async with client(store.address, hello("b"), other_put) as other:
                await other.expect(StoreWelcome)
                assert (await other.expect(PutGranted)).slots == (NO_ROOM,)
                process.kill()
                await asyncio.sleep(SETTLE_S + 0.2)
                other.send(other_put)
                assert (await other.expect(PutGranted)).slots == (0,)
                # The same incarnation in a new session: its copies are over.
                async with client(store.address, hello("b"), PUT) as again:
                    await again.expect(StoreWelcome)
                    assert (await again.expect(PutGranted)).slots == (0,)
                    assert await other.read() is None

    asyncio.run(scenario())


def test_an_error_of_the_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served() as store, client(store.address, hello()) as one:
            await one.read()
            monkeypatch.setattr(store.sessions.store, "receive", lambda *_: 1 / 0)
            one.send(FIND)
            assert await one.read() is None
            assert store.num_crashes == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ValueError, KeyError])
@pytest.mark.parametrize("method", ["poll", "take_outgoing", "stats"])
def test_an_error_of_a_poll_is_a_crash(monkeypatch: pytest.MonkeyPatch, error: type[Exception], method: str) -> None:
    """Without polls, no slot of a dead worker would return."""

    def fail() -> None:
        raise error("planted")

    async def scenario() -> None:
        async with served() as store, client(store.address, hello()) as one:
            await one.expect(StoreWelcome)
            monkeypatch.setattr(store.sessions.store, method, fail)
            with pytest.raises(error):
                await asyncio.wait_for(store.polls, 5.0)
            assert store.num_crashes == 1

    asyncio.run(scenario())


def test_metrics_and_integrity_are_told() -> None:
    async def scenario() -> None:
        async with served() as store, open_channel(store.address) as channel:
            admin = store_pb2_grpc.StoreAdminStub(channel)
            metadata = cluster_metadata(TOKEN)

            async def metrics() -> str:
                answer = await admin.ReadMetrics(worker_pb2.ReadMetricsRequest(), metadata=metadata)
                text: str = answer.text.decode()
                return text

            assert "tandem_process_restarts_total 0.0" in await metrics()
            assert "tandem_store_slots" not in await metrics()
            async with client(store.address, hello(), PUT, FIND) as one:
                for _ in range(3):
                    await one.read()
                await asyncio.sleep(0.1)
                text = await metrics()
                for line in (
                    'slots{state="free",store="store-0"} 3.0',
                    'slots{state="writing",store="store-0"} 1.0',
                    'sessions{store="store-0"} 1.0',
                    'offered_pages_total{answer="granted",store="store-0"} 1.0',
                    'missed_pages_total{store="store-0"} 1.0',
                ):
                    assert f"tandem_store_{line}" in text
                report = await admin.CheckIntegrity(worker_pb2.CheckIntegrityRequest(), metadata=metadata)
                assert report.violation == ""

    asyncio.run(scenario())


def test_metrics_can_be_collected_before_any_session() -> None:
    assert b"tandem_store" not in generate_latest(store_registry("store-0", lambda: None, lambda: None, 0))

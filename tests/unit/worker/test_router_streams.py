"""A worker and several routers over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from tandem.messages import (
    Abort,
    Admit,
    CachedPrefixes,
    Failed,
    FirstToken,
    Heartbeat,
    Hello,
    LinkState,
    Peer,
    Peers,
    Recall,
    Recalled,
    RepeatPrefixes,
    ResetCache,
    TokenEvent,
    Tokens,
    Welcome,
)
from tandem.page_changes import PageChanges
from tandem.request_ids import make_request_id, router_of
from tandem.rpc.batch_writer import BatchWriter
from tandem.rpc.channel import bind, new_server
from tandem.rpc.codec import ROUTER_CODEC, WORKER_CODEC
from tandem.rpc.credentials import ClusterCredentials
from tandem.sampling_params import SamplingParams
from tandem.v1 import worker_pb2_grpc
from tandem.worker.control_client import RefusedError
from tandem.worker.events import FromRouter, RouterLost
from tandem.worker.records import RecordKeeper
from tandem.worker.router_streams import RouterStreams
from tests.fakes.link_ends import wait_until
from tests.fakes.scripted_worker import hello


class RouterPort(worker_pb2_grpc.ClusterServicer):
    """A router's end of a worker's streams, with one address over several lives.

    Attributes:
        heard: the worker's messages except heartbeats.
    """

    def __init__(self) -> None:
        self.wants_prefixes = False
        self.address = ""
        self.heard: list[Any] = []
        self._life = 0
        self._name = f"router{id(self)}"
        self._port = 0
        self._server: Any = None
        self._writer: BatchWriter | None = None

    @property
    def incarnation(self) -> str:
        return f"{self._name}life{self._life}"

    async def start(self) -> None:
        self._life += 1
        self._server = new_server()
        worker_pb2_grpc.add_ClusterServicer_to_server(self, self._server)
        self.address = bind(self._server, "127.0.0.1", self._port)
        self._port = int(self.address.rpartition(":")[2])
        await self._server.start()

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        await self._server.stop(grace=0.0)

    def say(self, *messages: Any) -> None:
        assert self._writer is not None
        self._writer.send(messages)

    async def Control(self, batches: Any, context: Any) -> AsyncIterator[Any]:
        self._writer = writer = BatchWriter(ROUTER_CODEC)
        writer.send([Welcome(self.incarnation, self.wants_prefixes)])
        reader = asyncio.create_task(self._read(batches))
        try:
            async for batch in writer.batches():
                yield batch
        finally:
            reader.cancel()

    async def _read(self, batches: Any) -> None:
        async for batch in batches:
            self.heard += [m for m in WORKER_CODEC.decode(batch) if not isinstance(m, Heartbeat | Hello)]


class RefusingRouter(worker_pb2_grpc.ClusterServicer):
    async def Control(self, batches: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "models differ")
        yield


class WorkerEnd:
    """Attributes: events: events for the engine thread; peers: peers to link to."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.events: list[Any] = []
        self.records = RecordKeeper(2**20)
        self.peers: Sequence[Peer] = ()
        self.num_welcomes = 0
        self.is_silent = False
        self.streams = RouterStreams(
            addresses,
            hello("p", "prefill"),
            credentials=ClusterCredentials(),
            heartbeat=lambda: None if self.is_silent else Heartbeat(1),
            heartbeat_interval_s=0.05,
            records=self.records,
            connect_timeout_s=1.0,
            post=self.events.append,
            set_peers=self._set_peers,
            on_connected=self._welcomed,
        )

    def _set_peers(self, peers: Sequence[Peer]) -> None:
        self.peers = peers

    def _welcomed(self) -> None:
        self.num_welcomes += 1


def scenario_of(num_routers: int) -> Callable[[Callable[..., Awaitable[None]]], Callable[[], None]]:
    """Run a test with a worker connected to `num_routers` routers."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            async with asyncio.timeout(20.0), AsyncExitStack() as stack:
                routers = [RouterPort() for _ in range(num_routers)]
                for router in routers:
                    await router.start()
                    stack.push_async_callback(router.stop)
                worker = WorkerEnd([router.address for router in routers])
                running = asyncio.create_task(worker.streams.run())
                await wait_until(lambda: worker.num_welcomes == num_routers)
                try:
                    await test(worker, running, *routers)
                finally:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)

        def wrapper() -> None:
            asyncio.run(run())

        return wrapper

    return decorate


def test_request_id_names_its_router() -> None:
    assert router_of(make_request_id("life-of-a-router", 12)) == "life-of-a-router"
    assert router_of("nobody's") == ""


@scenario_of(2)
async def test_each_router_hears_of_its_own_requests(worker: WorkerEnd, running: Any, *routers: RouterPort) -> None:
    a, b = (make_request_id(router.incarnation, 7) for router in routers)
    stranger = make_request_id("another-router", 7)
    event_a, event_b = TokenEvent(a, 0, 1, (11,)), TokenEvent(b, 0, 1, (12,))
    worker.streams.send(
        [
            LinkState("d", "life", up=True),
            FirstToken(a, 0, 0, 5, "", 0, 1),
            Failed(stranger, 0, "nobody hears it"),
            Tokens((event_a, TokenEvent(stranger, 0, 1, (13,)), event_b)),
            Failed(b, 0, "no luck"),
        ]
    )
    up = LinkState("d", "life", up=True)
    await wait_until(lambda: all(len(router.heard) == 3 for router in routers))
    assert routers[0].heard == [up, FirstToken(a, 0, 0, 5, "", 0, 1), Tokens((event_a,))]
    assert routers[1].heard == [up, Tokens((event_b,)), Failed(b, 0, "no luck")]


@scenario_of(1)
async def test_a_worker_that_must_be_silent_does_not_come_back(
    worker: WorkerEnd, running: Any, *routers: RouterPort
) -> None:
    (router,) = routers
    worker.is_silent = True
    await router.stop()
    await wait_until(lambda: any(isinstance(event, RouterLost) for event in worker.events))
    await router.start()
    await asyncio.sleep(0.3)
    assert worker.num_welcomes == 1
    worker.is_silent = False
    await wait_until(lambda: worker.num_welcomes == 2)


@scenario_of(2)
async def test_router_end_does_not_affect_other_routers(worker: WorkerEnd, running: Any, *routers: RouterPort) -> None:
    gone, other = routers
    lost = gone.incarnation
    await gone.stop()
    await wait_until(lambda: RouterLost(lost) in worker.events)
    other.say(Abort(make_request_id(other.incarnation, 1), 0))
    await wait_until(lambda: any(isinstance(e, FromRouter) and isinstance(e.message, Abort) for e in worker.events))
    worker.streams.send(
        [Failed(make_request_id(lost, 1), 0, "nobody"), Failed(make_request_id(other.incarnation, 1), 0, "")]
    )
    await wait_until(lambda: bool(other.heard))
    # A restarted router keeps its address but is another router to requests.
    await gone.start()
    await wait_until(lambda: worker.num_welcomes == 3)
    assert gone.incarnation != lost
    worker.streams.send([Failed(make_request_id(gone.incarnation, 0), 0, "yours")])
    await wait_until(lambda: gone.heard == [Failed(make_request_id(gone.incarnation, 0), 0, "yours")])
    assert [event for event in worker.events if isinstance(event, RouterLost)] == [RouterLost(lost)]


@scenario_of(2)
async def test_messages_about_another_router_s_request_are_ignored(
    worker: WorkerEnd, running: Any, *routers: RouterPort
) -> None:
    wrong, right = routers
    lost = wrong.incarnation
    wrong.say(Abort(make_request_id(right.incarnation, 1), 0))
    await wait_until(lambda: RouterLost(lost) in worker.events)
    assert not any(isinstance(e, FromRouter) and isinstance(e.message, Abort) for e in worker.events)


@scenario_of(2)
async def test_any_router_may_have_caches_forgotten(worker: WorkerEnd, running: Any, *routers: RouterPort) -> None:
    routers[1].say(ResetCache())
    await wait_until(lambda: FromRouter(ResetCache()) in worker.events)


@scenario_of(2)
async def test_router_gets_cached_prefixes_on_request(worker: WorkerEnd, running: Any, *routers: RouterPort) -> None:
    uninterested, other = routers
    worker.streams.tell_changes(PageChanges((b"page-one", b"page-two"), ()))
    await other.stop()
    other.wants_prefixes = True
    await other.start()
    await wait_until(lambda: worker.num_welcomes == 3)
    worker.streams.tell_changes(PageChanges((), (b"page-one",)))
    changed = CachedPrefixes(1, is_whole=False, stored=b"", removed=b"page-one")
    await wait_until(lambda: changed in other.heard)
    whole = other.heard[0]
    assert (whole.number, whole.is_whole) == (0, True)
    assert whole.stored in (b"page-onepage-two", b"page-twopage-one")
    other.heard.clear()
    other.say(RepeatPrefixes())
    again = CachedPrefixes(2, is_whole=True, stored=b"page-two")
    await wait_until(lambda: other.heard == [again])
    assert uninterested.heard == []


@scenario_of(2)
async def test_any_router_can_recall_a_dead_router_s_request(
    worker: WorkerEnd, running: Any, *routers: RouterPort
) -> None:
    gone, other = routers
    request_id = make_request_id(gone.incarnation, 1)
    sampling = SamplingParams(9)
    gone.say(Admit(request_id, 0, (1,), (), sampling, 1.0, record_id="record", resume_token=b"token"))
    await wait_until(lambda: any(isinstance(e, FromRouter) and isinstance(e.message, Admit) for e in worker.events))
    worker.streams.send([Tokens((TokenEvent(request_id, 0, 0, (5, 6)),))])
    lost = gone.incarnation
    await gone.stop()
    await wait_until(lambda: RouterLost(lost) in worker.events)
    # The router's end has not reached the engine thread; messages until then are dropped.
    worker.streams.send([Tokens((TokenEvent(request_id, 0, 2, (7,)),))])
    other.say(Recall("mine", "record"), Recall("unknown", "another"))
    await wait_until(lambda: Recalled("unknown") in other.heard)
    assert Recalled("mine", 0, (5, 6, 7), b"token") in other.heard
    assert not any(isinstance(e, FromRouter) and isinstance(e.message, Recall) for e in worker.events)


@scenario_of(2)
async def test_links_are_kept_to_peers_named_by_any_router(
    worker: WorkerEnd, running: Any, *routers: RouterPort
) -> None:
    d0, d1 = Peer("d0", "life", "a:1"), Peer("d1", "life", "a:2")
    routers[0].say(Peers((d0,)))
    routers[1].say(Peers((d0, d1)))
    await wait_until(lambda: set(worker.peers) == {d0, d1})
    await routers[1].stop()
    await asyncio.sleep(0.6)
    assert set(worker.peers) == {d0, d1}


@scenario_of(2)
async def test_a_worker_gives_up_when_no_router_is_left(worker: WorkerEnd, running: Any, *routers: RouterPort) -> None:
    await routers[0].stop()
    await asyncio.sleep(1.7)
    assert not running.done()
    await routers[1].stop()
    with pytest.raises(ConnectionError, match=f"no router at {routers[0].address}, {routers[1].address} for 1 s"):
        await running


@scenario_of(2)
async def test_routers_come_and_go(worker: WorkerEnd, running: Any, *routers: RouterPort) -> None:
    first, second = routers
    worker.streams.set_addresses([second.address])
    await wait_until(lambda: RouterLost(first.incarnation) in worker.events)
    worker.streams.set_addresses([second.address, first.address])
    await wait_until(lambda: worker.num_welcomes == 3)
    assert RouterLost(second.incarnation) not in worker.events and not running.done()
    await first.stop()
    await second.stop()
    with pytest.raises(ConnectionError, match=f"no router at {second.address}, {first.address} for 1 s"):
        await running


def test_a_cancelled_call_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC cancels a call whose messages it cannot write."""
    calls: list[Any] = []

    class Stub(worker_pb2_grpc.ClusterStub):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            begin = self.Control

            def keep(*args: Any, **kwargs: Any) -> Any:
                calls.append(begin(*args, **kwargs))
                return calls[-1]

            self.Control = keep

    monkeypatch.setattr(worker_pb2_grpc, "ClusterStub", Stub)

    @scenario_of(2)
    async def scenario(worker: WorkerEnd, running: Any, *routers: RouterPort) -> None:
        calls[0].cancel()
        await wait_until(lambda: worker.num_welcomes == 3)
        assert len([event for event in worker.events if isinstance(event, RouterLost)]) == 1
        assert not running.done()

    scenario()


def test_refused_worker_does_not_retry() -> None:
    async def scenario() -> None:
        server = new_server()
        worker_pb2_grpc.add_ClusterServicer_to_server(RefusingRouter(), server)
        address = bind(server, "127.0.0.1", 0)
        await server.start()
        try:
            async with asyncio.timeout(10.0):
                with pytest.raises(RefusedError, match=r"^models differ$"):
                    await WorkerEnd([address]).streams.run()
        finally:
            await server.stop(None)

    asyncio.run(scenario())


@scenario_of(2)
async def test_only_a_new_router_is_told_open_links(worker: WorkerEnd, running: Any, *routers: RouterPort) -> None:
    """Told to all at each welcome, links would cost the square of the routers."""
    up, down = LinkState("d0", "life", up=True), LinkState("d1", "life", up=False, reason="cut")
    worker.streams.send([up, LinkState("d1", "life", up=True), down])
    await wait_until(lambda: down in routers[0].heard and down in routers[1].heard)
    await routers[1].stop()
    routers[1].heard.clear()
    await routers[1].start()
    await wait_until(lambda: bool(routers[1].heard))
    assert routers[1].heard == [up]
    assert routers[0].heard.count(up) == 1

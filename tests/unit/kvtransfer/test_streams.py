"""Links over gRPC, between the two ends that keep them: when a next epoch may open."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from engine.kvcache.base import PageLayout
from engine.kvcache.pool import CpuKvPool
from kvtransfer.events import LinkClosed, ReceiverLinkOpened, SenderLinkOpened
from kvtransfer.streams import LinkDialer, LinkServer
from kvtransfer.transports.factory import TransportFactory
from tandem.messages import PageFormat, Peer
from tandem.rpc.channel import bind, new_server
from worker.events import Event

LAYOUT = PageLayout(num_layers=1, page_size=4, num_kv_heads=1, head_dim=4, dtype="float32")
FORMAT = PageFormat("fake", 1, 4, 1, 4, "float32")
# Longer than the dialer waits between two tries.
TOO_LONG_S = 0.6


class Ends:
    """A dialer and a server in one loop, and all that they tell their engine threads."""

    def __init__(self) -> None:
        self.sender_events: list[Event] = []
        self.receiver_events: list[Event] = []
        pool = CpuKvPool(LAYOUT, 4, "streams")
        transports = TransportFactory(pool, "127.0.0.1", ("shared_memory", "tcp"))
        self.dialer = LinkDialer("p", "p life", FORMAT, transports, self.sender_events.append, "")
        self.link_server = LinkServer("d life", FORMAT, transports, self.receiver_events.append)
        self.server = new_server()
        self.link_server.add_to(self.server)
        self.peer = Peer("d", "d life", bind(self.server, "127.0.0.1", 0))

    async def __aenter__(self) -> "Ends":
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        stopping = asyncio.create_task(self.dialer.stop())
        while not stopping.done():
            for event in self.of(LinkClosed):
                event.when_quiet()
            await asyncio.sleep(0.01)
        await self.server.stop(grace=None)

    def of(self, kind: type[Event]) -> list:
        return [event for event in self.sender_events if isinstance(event, kind)]

    @property
    def num_epochs(self) -> int:
        return sum(isinstance(event, ReceiverLinkOpened) for event in self.receiver_events)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def open_epoch(self) -> None:
        self.dialer.set_peers([self.peer])
        await self.wait_until(lambda: len(self.of(SenderLinkOpened)) == 1)

    async def assert_next_epoch_waits_for_quiet(self) -> None:
        """The engine thread has not said yet that the copies of the first epoch are over."""
        with suppress(TimeoutError):
            await self.wait_until(lambda: self.num_epochs > 1, TOO_LONG_S)
        assert self.num_epochs == 1
        (closed,) = self.of(LinkClosed)
        closed.when_quiet()
        await self.wait_until(lambda: len(self.of(SenderLinkOpened)) == 2)


async def break_stream(ends: Ends) -> None:
    (opened,) = ends.of(SenderLinkOpened)
    ends.link_server.close_link(opened.welcome.epoch, "broken")
    await ends.wait_until(lambda: len(ends.of(LinkClosed)) == 1)


async def forget_peer(ends: Ends) -> None:
    ends.dialer.set_peers([])
    await ends.wait_until(lambda: len(ends.of(LinkClosed)) == 1)
    ends.dialer.set_peers([ends.peer])


async def forget_peer_for_a_moment(ends: Ends) -> None:
    ends.dialer.set_peers([])
    ends.dialer.set_peers([ends.peer])
    await ends.wait_until(lambda: len(ends.of(LinkClosed)) == 1)


async def break_stream_and_forget_peer(ends: Ends) -> None:
    await break_stream(ends)
    for peers in ([], [ends.peer], [], [ends.peer]):
        ends.dialer.set_peers(peers)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "end_first", [break_stream, forget_peer, forget_peer_for_a_moment, break_stream_and_forget_peer]
)
def test_next_epoch_waits_for_the_copies_of_the_one_before(end_first: Callable) -> None:
    """A decode worker takes a new epoch as proof that the old one is quiet, and gives its pages to others."""

    async def scenario() -> None:
        async with Ends() as ends:
            await ends.open_epoch()
            await end_first(ends)
            await ends.assert_next_epoch_waits_for_quiet()

    asyncio.run(scenario())

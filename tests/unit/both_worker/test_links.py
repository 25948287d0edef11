"""Links of both workers, each way, over real gRPC."""

import asyncio
import itertools

from tandem.both_worker.links import TwoWayLinks
from tandem.kvtransfer.events import (
    FromReceiver,
    FromSender,
    ReceiverLinkClosed,
    ReceiverLinkOpened,
    SenderLinkClosed,
    SenderLinkOpened,
)
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.link_dialer import LinkDialer
from tandem.kvtransfer.link_server import LinkServer
from tandem.messages import Peer, Renewed, Revoke
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.events import Event
from tests.fakes.link_ends import ONE_RANK, PAGE_FORMAT, wait_until
from tests.fakes.transport import ScriptedOpening


class TwoWayEnd:
    """A worker's links. Attributes: events: events for its engine thread."""

    def __init__(self, worker_id: str) -> None:
        self.events: list[Event] = []
        life = f"{worker_id} life"
        ranks = LinkRanks(ONE_RANK[0], {"scripted": ScriptedOpening()})
        out = LinkDialer(worker_id, life, PAGE_FORMAT, ranks, self.events.append, ClusterCredentials())
        self.links = TwoWayLinks(worker_id, out, LinkServer(life, PAGE_FORMAT, ranks, self.events.append))
        self.server = new_server()
        self.links.add_to(self.server)
        self.peer = Peer(worker_id, life, bind(self.server, "127.0.0.1", 0))

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def test_two_workers_link_each_way_but_not_to_themselves() -> None:
    async def scenario() -> None:
        ends = [TwoWayEnd(name) for name in ("a", "b")]
        for end in ends:
            await end.server.start()
        for end in ends:
            # A router names all receiving workers, the worker itself too.
            end.links.set_peers([other.peer for other in ends])
        for end, kind in itertools.product(ends, (SenderLinkOpened, ReceiverLinkOpened)):
            await wait_until(lambda end=end, kind=kind: len(end.of(kind)) == 1)
        assert [end.links.mapped_workers() for end in ends] == [["b"], ["a"]]
        a, b = ends
        (to_b,), (from_b,) = a.of(SenderLinkOpened), a.of(ReceiverLinkOpened)
        assert isinstance(to_b, SenderLinkOpened) and isinstance(from_b, ReceiverLinkOpened)
        assert (to_b.peer_id, from_b.hello.sender_id) == ("b", "b") and to_b.epoch != from_b.epoch
        a.links.send(to_b.epoch, [Renewed("of a's")])
        a.links.send(from_b.epoch, [Revoke("of b's")])
        await wait_until(lambda: bool(b.of(FromSender) and b.of(FromReceiver)))
        assert b.of(FromSender) == [FromSender(to_b.epoch, Renewed("of a's"))]
        assert b.of(FromReceiver) == [FromReceiver(from_b.epoch, Revoke("of b's"))]
        a.links.close_link(from_b.epoch, "enough")
        await wait_until(lambda: bool(a.of(ReceiverLinkClosed) and b.of(SenderLinkClosed)))
        assert not a.of(SenderLinkClosed) and not b.of(ReceiverLinkClosed)
        stopping = asyncio.gather(*(end.links.stop() for end in ends))
        while not stopping.done():
            for end in ends:
                for closed in end.of(SenderLinkClosed):
                    assert isinstance(closed, SenderLinkClosed)
                    closed.when_quiet()
            await asyncio.sleep(0.01)
        for end in ends:
            await end.server.stop(grace=None)

    asyncio.run(scenario())

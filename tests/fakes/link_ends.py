"""Both ends of links in one event loop, with real gRPC and without engine threads."""

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from tandem.head_slice import HeadSlice
from tandem.kvtransfer.events import ReceiverLinkOpened, SenderLinkClosed, SenderLinkOpened
from tandem.kvtransfer.lanes.ranks import LinkRanks
from tandem.kvtransfer.link_dialer import LinkDialer
from tandem.kvtransfer.link_server import LinkServer
from tandem.kvtransfer.transports.base import Transport
from tandem.messages import LinkRank, PageFormat, Peer
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.events import Event

PAGE_FORMAT = PageFormat("fake", 64, "fake")
ALL_HEADS = HeadSlice(0, 4, 4)
ONE_RANK = (LinkRank(1, "", ALL_HEADS),)
E = TypeVar("E", bound=Event)


class ReceiverEnd:
    """A decode worker's server. Attributes: events: events sent to its engine thread."""

    _numbers = itertools.count()

    def __init__(
        self,
        transports: Mapping[str, Transport],
        page_format: PageFormat = PAGE_FORMAT,
        gpu: str = "",
        ranks: LinkRanks | None = None,
    ) -> None:
        """Args: ranks: of a worker with several; None: one, with all heads."""
        self.events: list[Event] = []
        name = f"d{next(self._numbers)}"
        ranks = ranks or LinkRanks(LinkRank(os.getpid(), gpu, ALL_HEADS), transports)
        self.links = LinkServer(f"{name} life", page_format, ranks, self.events.append)
        self._server = new_server()
        self.links.add_to(self._server)
        self.peer = Peer(name, f"{name} life", bind(self._server, "127.0.0.1", 0))

    async def __aenter__(self) -> "ReceiverEnd":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.links.stop()
        await self._server.stop(grace=None)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def offers(self) -> list[tuple[str, ...]]:
        return [event.hello.transports for event in self.of(ReceiverLinkOpened)]


class SenderEnd:
    """A prefill worker's dialer. Attributes: events: events sent to its engine thread."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        page_format: PageFormat = PAGE_FORMAT,
        worker_id: str = "p",
        gpu: str = "",
        credentials: ClusterCredentials | None = None,
        ranks: LinkRanks | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.links = LinkDialer(
            worker_id,
            f"{worker_id} life",
            page_format,
            ranks or LinkRanks(LinkRank(os.getpid(), gpu, ALL_HEADS), transports),
            self.events.append,
            credentials or ClusterCredentials(),
        )

    async def __aenter__(self) -> "SenderEnd":
        return self

    async def __aexit__(self, *_: object) -> None:
        stopping = asyncio.create_task(self.links.stop())
        while not stopping.done():
            for event in self.of(SenderLinkClosed):
                event.when_quiet()
            await asyncio.sleep(0.01)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def opened(self) -> list[str]:
        return [event.transport_name for event in self.of(SenderLinkOpened)]


async def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for the condition; raise TimeoutError if it stays false."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

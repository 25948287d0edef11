from collections.abc import Sequence

import grpc

from tandem.kvtransfer.link_dialer import LinkDialer
from tandem.kvtransfer.link_server import LinkServer
from tandem.messages import Peer, ReceiverMessage, SenderMessage
from tandem.worker.base import LinkConnections


class NoLinks(LinkConnections):
    def add_to(self, server: grpc.aio.Server) -> None: ...

    def set_peers(self, peers: Sequence[Peer]) -> None: ...

    def send(self, epoch: str, messages: Sequence[SenderMessage | ReceiverMessage]) -> None: ...

    def close_link(self, epoch: str, reason: str) -> None: ...

    def mapped_workers(self) -> list[str]:
        return []

    async def stop(self) -> None: ...


class TwoWayLinks(LinkConnections):
    """Outgoing links, which this worker dials, and independent incoming links, which it serves."""

    def __init__(self, worker_id: str, out: LinkDialer, into: LinkServer) -> None:
        self._worker_id = worker_id
        self._out = out
        self._into = into

    def add_to(self, server: grpc.aio.Server) -> None:
        self._into.add_to(server)

    def set_peers(self, peers: Sequence[Peer]) -> None:
        self._out.set_peers([peer for peer in peers if peer.worker_id != self._worker_id])

    def send(self, epoch: str, messages: Sequence[SenderMessage | ReceiverMessage]) -> None:
        # Only the end that owns an epoch knows its random id.
        self._out.send(epoch, messages)
        self._into.send(epoch, messages)

    def close_link(self, epoch: str, reason: str) -> None:
        self._out.close_link(epoch, reason)
        self._into.close_link(epoch, reason)

    def mapped_workers(self) -> list[str]:
        return self._out.mapped_workers()

    async def stop(self) -> None:
        await self._out.stop()
        await self._into.stop()

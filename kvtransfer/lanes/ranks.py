"""The ranks of one worker, as its links see them."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tandem.engine.kvcache.pool import KvPool
from tandem.head_slice import HeadSlice
from tandem.kvtransfer.lanes.joined import JoinedReceiver, JoinedSender
from tandem.kvtransfer.lanes.plan import Lane, plan_lanes
from tandem.kvtransfer.lanes.remote import RemoteRank
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport
from tandem.kvtransfer.transports.opening import OpeningError, describe, let_go, open_ends
from tandem.messages import LinkRank


class LinkRanks:
    """Opens the lanes of an epoch on all ranks of this worker.

    Attributes:
        transports: the leader's, best first; followers have the same.
        ranks: this worker's processes, the leader first.
    """

    def __init__(
        self, leader: LinkRank, transports: Mapping[str, Transport], followers: Sequence[RemoteRank] = ()
    ) -> None:
        self.transports = transports
        self.ranks = (leader, *(follower.rank for follower in followers))
        self._followers = followers

    @classmethod
    def of(cls, pool: KvPool, transports: Mapping[str, Transport], followers: Sequence[RemoteRank] = ()) -> "LinkRanks":
        """Args: pool: the leader's."""
        return cls(LinkRank(os.getpid(), pool.gpu, pool.layout.heads), transports, followers)

    @property
    def heads(self) -> tuple[HeadSlice, ...]:
        return tuple(rank.heads for rank in self.ranks)

    async def open_sender(
        self, transport: str, receivers: Sequence[HeadSlice], endpoints: Sequence[bytes]
    ) -> SenderTransport:
        """Opens the sending ends of all lanes.

        Args:
            receivers: heads of the receiver's ranks.
            endpoints: of each lane.

        Raises:
            ValueError: the lanes do not fit the endpoints.
            OpeningError: a lane did not open; then none has.
        """
        lanes = plan_lanes(self.heads, receivers)
        if len(lanes) != len(endpoints):
            raise ValueError(f"the receiver sent {len(endpoints)} endpoints for {len(lanes)} lanes")
        ends = await open_ends(
            [self._sender(transport, lane, endpoint) for lane, endpoint in zip(lanes, endpoints, strict=True)]
        )
        return ends[0] if len(ends) == 1 else JoinedSender(ends)

    async def open_receiver(
        self, transport: str, senders: Sequence[HeadSlice]
    ) -> tuple[ReceiverTransport, tuple[bytes, ...]]:
        """Opens the receiving ends of all lanes, and returns their endpoints. Raises like `open_sender`."""
        lanes = plan_lanes(senders, self.heads)
        ends = await open_ends([self._receiver(transport, lane) for lane in lanes])
        try:
            endpoints = tuple([end.endpoint() for end in ends])
        except Exception as error:
            for end in ends:
                let_go(end)
            raise OpeningError(describe(error)) from error
        return ends[0] if len(ends) == 1 else JoinedReceiver(ends), endpoints

    def _sender(self, transport: str, lane: Lane, endpoint: bytes) -> Callable[[], SenderTransport]:
        if lane.sender_rank == 0:
            return partial(self.transports[transport].open_sender, endpoint, lane)
        return partial(self._followers[lane.sender_rank - 1].open_sender, transport, endpoint, lane)

    def _receiver(self, transport: str, lane: Lane) -> Callable[[], ReceiverTransport]:
        if lane.receiver_rank == 0:
            return partial(self.transports[transport].open_receiver, lane)
        return partial(self._followers[lane.receiver_rank - 1].open_receiver, transport, lane)

"""What the gRPC side of a worker's links tells its engine thread.

A worker may be the sender on some links and the receiver on others. What befalls an epoch is told to the end that the
worker has of it, by the event's type: no end can take the other's beginning, end or message for its own, whatever the
epochs are called.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.messages import LinkHello, ReceiverMessage, SenderMessage
from tandem.worker.events import Event


class SenderLinkEvent(Event):
    """Of a link on which this worker sends: for its handover alone."""

    __slots__ = ()


class ReceiverLinkEvent(Event):
    """Of a link on which this worker receives: for its lease book alone."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SenderLinkOpened(SenderLinkEvent):
    """This worker's link to `peer_id`, in that life of it, opened an epoch.

    Attributes:
        transport: the sending end of the epoch's transport, of the name beside it.
    """

    peer_id: str
    peer_incarnation: str
    epoch: str
    transport_name: str
    transport: SenderTransport


@dataclass(frozen=True, slots=True)
class SenderLinkFailed(SenderLinkEvent):
    """No transport to that life of `peer_id` can be opened for now; `reason` says why, of each."""

    peer_id: str
    peer_incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class SenderLinkClosed(SenderLinkEvent):
    """The stream of an epoch that was opened to a receiver ended.

    Attributes:
        when_quiet: to be called once no copy of this epoch still runs; then the next one may open.
    """

    epoch: str
    reason: str
    when_quiet: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ReceiverLinkOpened(ReceiverLinkEvent):
    """A sender opened an epoch of its link to this worker.

    Attributes:
        transport: the receiving end of the epoch's transport.
        sender_is_gone: whether the sender's process has exited, and a settle time has passed since.
    """

    epoch: str
    hello: LinkHello
    transport: ReceiverTransport
    sender_is_gone: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class ReceiverLinkClosed(ReceiverLinkEvent):
    """The stream of an epoch that a sender had opened ended. Its sender may be writing still."""

    epoch: str


@dataclass(frozen=True, slots=True)
class FromReceiver(SenderLinkEvent):
    """What the receiver of an open epoch says to this worker, which sends on it."""

    epoch: str
    message: ReceiverMessage


@dataclass(frozen=True, slots=True)
class FromSender(ReceiverLinkEvent):
    """What the sender of an open epoch says to this worker, which receives on it."""

    epoch: str
    message: SenderMessage

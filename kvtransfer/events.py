"""Events from the gRPC side of a worker's links to its engine thread.

A worker may send on some links and receive on others. The event's type selects the end, so no end takes an event of the
other, even if epochs had equal names.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.messages import LinkHello, ReceiverMessage, SenderMessage
from tandem.worker.events import Event


class SenderLinkEvent(Event):
    """An event of a link on which this worker sends, for its handover."""

    __slots__ = ()


class ReceiverLinkEvent(Event):
    """An event of a link on which this worker receives, for its lease book."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SenderLinkOpened(SenderLinkEvent):
    """This worker's link to an incarnation of `peer_id` opened an epoch.

    Attributes:
        transport: sending end of the epoch's transport.
    """

    peer_id: str
    peer_incarnation: str
    epoch: str
    transport_name: str
    transport: SenderTransport


@dataclass(frozen=True, slots=True)
class SenderLinkFailed(SenderLinkEvent):
    """No transport to this incarnation of `peer_id` can be opened now; `reason` covers each."""

    peer_id: str
    peer_incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class SenderLinkClosed(SenderLinkEvent):
    """The stream of an epoch to a receiver ended.

    Attributes:
        when_quiet: must be called once no copy of this epoch runs; the next epoch opens after it.
    """

    epoch: str
    reason: str
    when_quiet: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ReceiverLinkOpened(ReceiverLinkEvent):
    """A sender opened an epoch of its link to this worker.

    Attributes:
        transport: receiving end of the epoch's transport.
        sender_is_gone: returns whether the sender's process has exited and the settle time has passed.
    """

    epoch: str
    hello: LinkHello
    transport: ReceiverTransport
    sender_is_gone: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class ReceiverLinkClosed(ReceiverLinkEvent):
    """The stream of an epoch from a sender ended. The sender may still write."""

    epoch: str


@dataclass(frozen=True, slots=True)
class FromReceiver(SenderLinkEvent):
    """A message from the receiver of an open epoch."""

    epoch: str
    message: ReceiverMessage


@dataclass(frozen=True, slots=True)
class FromSender(ReceiverLinkEvent):
    """A message from the sender of an open epoch."""

    epoch: str
    message: SenderMessage

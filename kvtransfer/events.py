"""Events from the gRPC side of a worker's links to its engine thread.

A worker may send on some links and receive on others; the event's type selects the end.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.messages import LinkHello, ReceiverMessage, SenderMessage
from tandem.worker.events import Event


class SenderLinkEvent(Event):
    """For the handover, which sends."""

    __slots__ = ()


class ReceiverLinkEvent(Event):
    """For the lease book, which receives."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SenderLinkOpened(SenderLinkEvent):
    """An epoch to an incarnation of `peer_id` opened."""

    peer_id: str
    peer_incarnation: str
    epoch: str
    transport_name: str
    transport: SenderTransport


@dataclass(frozen=True, slots=True)
class SenderLinkFailed(SenderLinkEvent):
    """No transport to this incarnation of `peer_id` opens now; `reason` covers each."""

    peer_id: str
    peer_incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class SenderLinkClosed(SenderLinkEvent):
    """The stream of an epoch to a receiver ended.

    Attributes:
        when_quiet: to be called once none of its copies runs; then the next epoch opens.
    """

    epoch: str
    reason: str
    when_quiet: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ReceiverLinkOpened(ReceiverLinkEvent):
    """A sender opened an epoch.

    Attributes:
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
    epoch: str
    message: ReceiverMessage


@dataclass(frozen=True, slots=True)
class FromSender(ReceiverLinkEvent):
    epoch: str
    message: SenderMessage

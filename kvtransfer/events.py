"""What the gRPC side of a worker's links tells its engine thread. An epoch's beginning and end are told to the end that
the worker has of it, so that none takes the other's."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.messages import LinkHello, ReceiverMessage, SenderMessage
from worker.events import Event


@dataclass(frozen=True, slots=True)
class SenderLinkOpened(Event):
    """This prefill worker's link to `peer_id`, in that life of it, opened an epoch.

    Attributes:
        transport: the sending end of the epoch's transport, of the name beside it.
    """

    peer_id: str
    peer_incarnation: str
    epoch: str
    transport_name: str
    transport: SenderTransport


@dataclass(frozen=True, slots=True)
class SenderLinkFailed(Event):
    """No transport to that life of `peer_id` can be opened for now; `reason` says why, of each."""

    peer_id: str
    peer_incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class SenderLinkClosed(Event):
    """The stream of an epoch that was opened to a receiver ended.

    Attributes:
        when_quiet: to be called once no copy of this epoch still runs; then the next one may open.
    """

    epoch: str
    reason: str
    when_quiet: Callable[[], None]


@dataclass(frozen=True, slots=True)
class ReceiverLinkOpened(Event):
    """A prefill worker opened an epoch of its link to this decode worker.

    Attributes:
        transport: the receiving end of the epoch's transport.
        sender_is_gone: whether the sender's process has exited, and a settle time has passed since.
    """

    epoch: str
    hello: LinkHello
    transport: ReceiverTransport
    sender_is_gone: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class ReceiverLinkClosed(Event):
    """The stream of an epoch that a sender had opened ended. Its sender may be writing still."""

    epoch: str


@dataclass(frozen=True, slots=True)
class FromLink(Event):
    """What the other end of an open epoch says."""

    epoch: str
    message: SenderMessage | ReceiverMessage

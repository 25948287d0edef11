"""What the gRPC side of a worker's links tells its engine thread."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.transports.base import ReceiverTransport
from tandem.messages import LinkHello, LinkWelcome, ReceiverMessage, SenderMessage
from worker.events import Event


@dataclass(frozen=True, slots=True)
class SenderLinkOpened(Event):
    """This prefill worker's link to `peer_id`, in that life of it, opened an epoch."""

    peer_id: str
    peer_incarnation: str
    welcome: LinkWelcome


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
class FromLink(Event):
    epoch: str
    message: SenderMessage | ReceiverMessage


@dataclass(frozen=True, slots=True)
class LinkClosed(Event):
    """The stream of an epoch ended.

    Attributes:
        when_quiet: to be called once no copy of this epoch that was submitted here still runs; then the next one
            may open.
    """

    epoch: str
    reason: str
    when_quiet: Callable[[], None]

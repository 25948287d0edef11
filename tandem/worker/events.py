"""What the asyncio thread of a worker tells its engine thread."""

from collections.abc import Callable
from dataclasses import dataclass

from tandem.messages import LinkHello, LinkWelcome, ReceiverMessage, RouterMessage, SenderMessage, WorkerStats


@dataclass(frozen=True, slots=True)
class FromRouter:
    message: RouterMessage


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The router's stream ended: so did every attempt it had here."""


@dataclass(frozen=True, slots=True)
class SenderLinkOpened:
    """This prefill worker's link to `peer_id` opened an epoch."""

    peer_id: str
    welcome: LinkWelcome


@dataclass(frozen=True, slots=True)
class ReceiverLinkOpened:
    """A prefill worker opened an epoch of its link to this decode worker.

    Attributes:
        sender_is_gone: whether the sender's process has exited, and a settle time has passed since.
    """

    epoch: str
    hello: LinkHello
    sender_is_gone: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class FromLink:
    epoch: str
    message: SenderMessage | ReceiverMessage


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The stream of an epoch ended.

    Attributes:
        when_quiet: to be called once no copy of this epoch that was submitted here still runs; then the next one
            may open.
    """

    epoch: str
    reason: str
    when_quiet: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks for an integrity check between two steps; `reply` gets the violation ("" if none) and the stats."""

    reply: Callable[[str, WorkerStats], None]


Event = FromRouter | RouterLost | SenderLinkOpened | ReceiverLinkOpened | FromLink | LinkClosed | Inspect

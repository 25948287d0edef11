"""The decode worker's end of a link: it answers lease requests and takes part in pushes, in the same way on every
transport.

It keeps no account of leases; LeaseBook does (decode_worker/leases.py). A plain object of the engine thread that sends
messages through a function it is given; gRPC is elsewhere (kvtransfer/link_server.py).
"""

from collections.abc import Callable, Sequence

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.transports.base import COMPLETED, ReceiverTransport
from tandem.messages import Granted, Pushing, ReceiverMessage, Refused, Revoke


class _SenderQuiet:
    """Completion of an epoch on a one-sided transport: its sender writes this worker's pages no more."""

    def __init__(self, sender_is_gone: Callable[[], bool]) -> None:
        self._sender_is_gone = sender_is_gone
        self._done = False

    def mark(self) -> None:
        self._done = True

    def done(self) -> bool:
        self._done = self._done or self._sender_is_gone()
        return self._done


class _Receive:
    """A receive is over when it is done, or when nothing of its epoch can touch this worker's pages any more."""

    def __init__(self, receive: Completion, link: "ReceiverLink") -> None:
        self._receive = receive
        self._link = link

    def done(self) -> bool:
        return self._receive.done() or self._link.is_quiet()


class ReceiverLink:
    """The decode worker's end of one epoch of a link."""

    def __init__(
        self,
        sender_id: str,
        sender_incarnation: str,
        epoch: str,
        transport: ReceiverTransport,
        sender_is_gone: Callable[[], bool],
        send: Callable[[ReceiverMessage], None],
    ) -> None:
        """Args: sender_is_gone: whether the sender's process has exited, and a settle time has passed since."""
        self.sender_id = sender_id
        self.sender_incarnation = sender_incarnation
        self.epoch = epoch
        self._sender_quiet = _SenderQuiet(sender_is_gone)
        self._transport = transport
        self._send = send
        self._over: Completion | None = None

    @property
    def failure(self) -> str:
        """Why the epoch must end, or ""."""
        return self._transport.failure

    def grant_lease(self, lease_id: str, cached_len: int, page_ids: Sequence[int]) -> None:
        """Args: cached_len: leading tokens that are here; page_ids: the destinations of those after them."""
        self._send(Granted(lease_id, cached_len, tuple(page_ids)))

    def refuse_lease(self, lease_id: str, reason: str) -> None:
        self._send(Refused(lease_id, reason))

    def revoke_lease(self, lease_id: str) -> None:
        """Asks for a lease back; the sender's answer settles it."""
        self._send(Revoke(lease_id))

    def expect_push(self, message: Pushing, page_ids: Sequence[int] | None) -> Completion:
        """A push is announced. Its number runs on both sides, whatever has become of its lease: otherwise all later
        pushes of the link would wait for ever.

        Args:
            page_ids: where its pages belong; None: nowhere, they are received and thrown away.

        Returns:
            Done when these pages hold what was pushed, or once the epoch is over.
        """
        if not self._transport.two_sided:
            return COMPLETED
        return _Receive(self._transport.receive_pages(message.link_seq, page_ids, message.num_pages), self)

    def mark_quiet(self) -> None:
        """The sender has said that none of its copies runs any more, by opening its next epoch."""
        self._sender_quiet.mark()

    def end_epoch(self) -> Completion:
        """The completion means that nothing of the epoch can touch this worker's pages any more."""
        aborted = self._transport.abort()
        self._over = aborted if self._transport.two_sided else self._sender_quiet
        return self._over

    def is_quiet(self) -> bool:
        """Whether the epoch has ended and nothing of it can touch this worker's pages any more."""
        return self._over is not None and self._over.done()

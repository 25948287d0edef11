"""The decode worker's end of a link, for all transports. A plain object of the engine thread: LeaseBook keeps the
leases, link_server.py does the gRPC."""

from collections.abc import Callable, Sequence

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.transports.base import COMPLETED, ReceiverTransport
from tandem.messages import Granted, Pushing, ReceiverMessage, Refused, Revoke


class _SenderQuiet:
    """Done when a one-sided sender no longer writes this worker's pages."""

    def __init__(self, sender_is_gone: Callable[[], bool]) -> None:
        self._sender_is_gone = sender_is_gone
        self._done = False

    def mark(self) -> None:
        self._done = True

    def done(self) -> bool:
        self._done = self._done or self._sender_is_gone()
        return self._done


class _Receive:
    """Done when the receive is done or its epoch cannot touch the pages."""

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
        self.sender_id = sender_id
        self.sender_incarnation = sender_incarnation
        self.epoch = epoch
        self._sender_quiet = _SenderQuiet(sender_is_gone)
        self._transport = transport
        self._send = send
        self._over: Completion | None = None

    @property
    def failure(self) -> str:
        """Reason to end the epoch, or ""."""
        return self._transport.failure

    def grant_lease(self, lease_id: str, cached_len: int, page_ids: Sequence[int]) -> None:
        """
        Args:
            cached_len: leading tokens cached here.
            page_ids: destinations of the tokens after them.
        """
        self._send(Granted(lease_id, cached_len, tuple(page_ids)))

    def refuse_lease(self, lease_id: str, reason: str) -> None:
        self._send(Refused(lease_id, reason))

    def revoke_lease(self, lease_id: str) -> None:
        """Asks for a lease back. The sender's answer settles it."""
        self._send(Revoke(lease_id))

    def expect_push(self, message: Pushing, page_ids: Sequence[int] | None) -> Completion:
        """Expects an announced push. Its number runs on both sides even if its lease has ended: otherwise later pushes
        would wait forever.

        Args:
            page_ids: destinations; None to discard the pages.

        Returns:
            Done when the pages have arrived, or when the epoch is over.
        """
        if not self._transport.two_sided:
            return COMPLETED
        return _Receive(self._transport.receive_pages(message.link_seq, page_ids, message.num_pages), self)

    def mark_quiet(self) -> None:
        """Notes the sender's next epoch: no copy of this one runs."""
        self._sender_quiet.mark()

    def end_epoch(self) -> Completion:
        """The completion means that nothing of the epoch can touch this worker's pages."""
        aborted = self._transport.abort()
        self._over = aborted if self._transport.two_sided else self._sender_quiet
        return self._over

    def is_quiet(self) -> bool:
        """Returns whether the epoch is over and cannot touch this worker's pages."""
        return self._over is not None and self._over.done()

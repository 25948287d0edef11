"""Base of both ends of a two-sided transport: a thread that moves pushes in the link's order."""

import logging
import queue
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from tandem.engine.kvcache.base import Completion
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport
from tandem.kvtransfer.transports.listener import Listener

logger = logging.getLogger(__name__)

# Header of a push: its number and its number of pages.
HEADER = struct.Struct("!QI")


class Flag:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._error = ""

    def set(self) -> None:
        self._event.set()

    def fail(self, error: str) -> None:
        """Makes `done` raise."""
        self._error = error

    def done(self) -> bool:
        if self._error:
            raise RuntimeError(self._error)
        return self._event.is_set()


class Transfer(NamedTuple):
    """A push at either end. Attributes: pages: local pages; None to discard."""

    link_seq: int
    num_pages: int
    pages: Sequence[int] | None
    completion: Flag


class Mover(ABC):
    def __init__(self) -> None:
        # None ends the thread.
        self._transfers: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._over = Flag()
        self._failure = ""
        self._aborted = False
        self._thread = threading.Thread(target=self._main, name="move-pages", daemon=True)

    @property
    def failure(self) -> str:
        return self._failure

    def abort(self) -> Completion:
        self._aborted = True
        self._transfers.put(None)
        self._wake()
        return self._over

    def _submit(self, link_seq: int, pages: Sequence[int] | None, num_pages: int) -> Completion:
        assert not self._aborted
        transfer = Transfer(link_seq, num_pages, pages, Flag())
        self._transfers.put(transfer)
        return transfer.completion

    def _main(self) -> None:
        try:
            self._meet_peer()
            self._work()
        except (OSError, ValueError, RuntimeError) as error:
            self._fail(str(error))
        except Exception as error:
            # Pushes are over and nothing has arrived, as after any failure.
            logger.exception("the thread that moves pages failed")
            self._fail(repr(error))
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._close()
        except Exception as error:
            # This worker's pages may still be touched, without an end.
            logger.exception("the thread that moves pages could not close its transport")
            self._over.fail(f"a transport could not be closed: {error!r}")
        else:
            self._over.set()

    def _fail(self, why: str) -> None:
        if not self._aborted:
            self._failure = f"the page connection failed: {why}"

    def _work(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            self._move(transfer)
            transfer.completion.set()

    @abstractmethod
    def _meet_peer(self) -> None:
        """Waits for the other end, if necessary. Raises like `_move`."""

    @abstractmethod
    def _move(self, transfer: Transfer) -> None:
        """Moves all bytes. Raises OSError, ValueError or RuntimeError if nothing more can move."""

    @abstractmethod
    def _wake(self) -> None:
        """Unblocks the thread. Called by other threads."""

    @abstractmethod
    def _close(self) -> None:
        """Closes everything; nothing touches this worker's pages afterwards. If it raises, the process must end."""


class _Sent:
    """Done when the bytes are sent or the thread has ended."""

    def __init__(self, moved: Completion, over: Completion) -> None:
        self._moved = moved
        self._over = over

    def done(self) -> bool:
        return self._moved.done() or self._over.done()


class SendingMover(Mover, SenderTransport):
    two_sided = True

    def copy_pages(self, link_seq: int, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Completion:
        assert len(src_pages) == len(dst_pages)
        return _Sent(self._submit(link_seq, src_pages, len(src_pages)), self._over)


class ReceivingMover(Mover, ReceiverTransport):
    two_sided = True
    _listener: Listener

    def endpoint(self) -> bytes:
        return self._listener.endpoint.encode()

    def receive_pages(self, link_seq: int, dst_pages: Sequence[int] | None, num_pages: int) -> Completion:
        assert dst_pages is None or len(dst_pages) == num_pages
        return self._submit(link_seq, dst_pages, num_pages)


def check_announced(header: bytes | bytearray, transfer: Transfer) -> None:
    """Raises ValueError if the header does not match the announced push."""
    if HEADER.unpack(header) != (transfer.link_seq, transfer.num_pages):
        raise ValueError(f"push {HEADER.unpack(header)} where {transfer[:2]} was announced")

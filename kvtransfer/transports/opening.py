"""A worker's transports, and how an end of one is opened: in a thread of its own, for it may take time, fail or hang.
Neither the event loop nor the engine thread waits for it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from tandem.engine.kvcache.pool import KvPool
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport
from tandem.kvtransfer.transports.table import TRANSPORTS
from tandem.rpc.credentials import ClusterCredentials

# One end may take so long to open; mapping a pool and connecting to a port take milliseconds.
OPEN_TIMEOUT_S = 5.0
# An end that nobody wants is asked so often whether it has let go of its peer's memory.
LET_GO_POLL_S = 0.01

End = TypeVar("End", SenderTransport, ReceiverTransport)


class OpeningError(Exception):
    """An end of a transport did not open; the message says why."""


def load_transports(
    names: Iterable[str], pool: KvPool, host: str, credentials: ClusterCredentials
) -> dict[str, Transport]:
    """Makes a worker's transports, in the order of their names.

    Args:
        host: the address to receive at.
        credentials: for connections to and from other workers.

    Raises:
        ValueError: there is no transport of such a name, or the worker's pool cannot travel that way.
    """
    return {name: TRANSPORTS.load(name)(pool, host, credentials) for name in names}


async def open_end(open_now: Callable[[], End]) -> End:
    """Opens an end of a transport in a thread, and waits for it no longer than OPEN_TIMEOUT_S.

    What opens after that, or after the caller was cancelled, is closed again: nothing of it stays.

    Args:
        open_now: opens it; may block.

    Raises:
        OpeningError: it failed, or took too long.
    """
    opened: Future[End] = Future()
    # An executor's threads are waited for at the process's end, and one that hangs would put that off for ever.
    threading.Thread(target=_open, args=(open_now, opened), name="open-transport", daemon=True).start()
    waiter = asyncio.wrap_future(opened)
    try:
        await asyncio.wait((waiter,), timeout=OPEN_TIMEOUT_S)
        if not waiter.done():
            raise OpeningError(f"it did not open within {OPEN_TIMEOUT_S:g} s")
        error = waiter.exception()
        if error is not None:
            raise OpeningError(describe(error)) from error
        return waiter.result()
    except BaseException:
        # If it has not opened yet, its thread finds that out when it does.
        if not opened.cancel() and opened.exception() is None:
            let_go(opened.result())
        raise


def let_go(end: SenderTransport | ReceiverTransport) -> None:
    """Closes an end that nobody wants, in a thread of its own, until nothing can touch this worker's pages by it."""
    threading.Thread(target=_abort, args=(end,), name="let-go-transport", daemon=True).start()


def _open(open_now: Callable[[], End], opened: "Future[End]") -> None:
    # Setting an outcome and cancelling exclude each other: one of the two sides sees that it came late.
    try:
        end = open_now()
    except Exception as error:
        with contextlib.suppress(InvalidStateError):
            opened.set_exception(error)
        return
    try:
        opened.set_result(end)
    except InvalidStateError:
        _abort(end)


def _abort(end: SenderTransport | ReceiverTransport) -> None:
    over = end.abort()
    while not over.done():
        time.sleep(LET_GO_POLL_S)


def describe(error: BaseException) -> str:
    """What a person reads of an error: one that no transport announces is named by its kind too."""
    return str(error) if isinstance(error, ValueError | OSError) and str(error) else repr(error)

"""Loads a worker's transports and opens their ends, each in its own thread, because opening may block, fail or hang."""

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

# Timeout of opening one end, in seconds. Mapping a pool or connecting takes milliseconds.
OPEN_TIMEOUT_S = 5.0
# Poll interval for an unwanted end's release of its peer's memory, in seconds.
LET_GO_POLL_S = 0.01

End = TypeVar("End", SenderTransport, ReceiverTransport)


class OpeningError(Exception):
    """An end of a transport did not open; the message has the reason."""


def load_transports(
    names: Iterable[str], pool: KvPool, host: str, credentials: ClusterCredentials
) -> dict[str, Transport]:
    """Creates a worker's transports, in the given order.

    Args:
        host: address to receive at.
        credentials: credentials for connections to other workers.

    Raises:
        ValueError: a name is unknown, or the pool cannot use the transport.
    """
    return {name: TRANSPORTS.load(name)(pool, host, credentials) for name in names}


async def open_end(open_now: Callable[[], End]) -> End:
    """Opens an end of a transport in a thread, with a timeout of OPEN_TIMEOUT_S. Closes an end that opens later or
    after a cancellation.

    Args:
        open_now: opens it; may block.

    Raises:
        OpeningError: it failed or took too long.
    """
    opened: Future[End] = Future()
    # Not an executor: the process's end would wait for a hanging thread.
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
        # If it has not opened, its thread sees the cancellation when it does.
        if not opened.cancel() and opened.exception() is None:
            let_go(opened.result())
        raise


def let_go(end: SenderTransport | ReceiverTransport) -> None:
    """Closes an unwanted end in its own thread, until nothing can touch this worker's pages through it."""
    threading.Thread(target=_abort, args=(end,), name="let-go-transport", daemon=True).start()


def _open(open_now: Callable[[], End], opened: "Future[End]") -> None:
    # Setting a result and cancelling exclude each other, so exactly one side closes a late end.
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
    """Returns the text of an error; unexpected kinds include their type."""
    return str(error) if isinstance(error, ValueError | OSError) and str(error) else repr(error)

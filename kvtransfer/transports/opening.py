"""Loads transports and opens their ends, each in its own thread, because opening may block, fail or hang."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from tandem.engine.kvcache.pool import KvPool
from tandem.kvtransfer.transports.base import ReceiverTransport, SenderTransport, Transport
from tandem.kvtransfer.transports.table import TRANSPORTS
from tandem.rpc.credentials import ClusterCredentials

# Timeout in seconds. Mapping a pool or connecting takes milliseconds.
OPEN_TIMEOUT_S = 5.0
LET_GO_POLL_S = 0.01

End = TypeVar("End", SenderTransport, ReceiverTransport)


class OpeningError(Exception):
    """An end of a transport did not open."""


def load_transports(
    names: Iterable[str], pool: KvPool, host: str, credentials: ClusterCredentials
) -> dict[str, Transport]:
    """Creates a worker's transports, in the given order. Raises ValueError for an unknown name or unsuitable pool."""
    return {name: TRANSPORTS.load(name)(pool, host, credentials) for name in names}


async def open_end(open_now: Callable[[], End]) -> End:
    """Opens an end in a thread. Closes an end that opens after the timeout or a cancellation.

    Raises:
        OpeningError: it failed or took longer than OPEN_TIMEOUT_S.
    """
    opened = start_opening(open_now)
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
        # Its thread sees a cancellation when it opens later.
        if not opened.cancel() and opened.exception() is None:
            let_go(opened.result())
        raise


async def open_ends(openings: Sequence[Callable[[], End]]) -> list[End]:
    """Opens several ends at once, all or none. Raises like `open_end`."""
    tasks = [asyncio.create_task(open_end(open_now)) for open_now in openings]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            # Raises the failure, if there is one. Otherwise all have ended.
            task.result()
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            if not task.cancel() and task.exception() is None:
                let_go(task.result())
        raise


def start_opening(open_now: Callable[[], End]) -> "Future[End]":
    """Opens an end in a thread. If the future is cancelled first, the thread closes the end."""
    opened: Future[End] = Future()
    # Not an executor: the process's exit would wait for a hanging thread.
    threading.Thread(target=_open, args=(open_now, opened), name="open-transport", daemon=True).start()
    return opened


def let_go(end: SenderTransport | ReceiverTransport) -> None:
    """Closes an end in its own thread, until nothing can touch this worker's pages through it."""
    threading.Thread(target=_abort, args=(end,), name="let-go-transport", daemon=True).start()


def _open(open_now: Callable[[], End], opened: "Future[End]") -> None:
    # A result and a cancellation exclude each other, so exactly one side closes a late end.
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
    """Returns an error's text, with its type if unexpected."""
    return str(error) if isinstance(error, ValueError | OSError) and str(error) else repr(error)

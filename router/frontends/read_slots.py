"""Limit on the number of messages being read."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tandem.router.errors import OverloadedError, RequestTimeoutError

T = TypeVar("T")

WAIT_TIMEOUT_S = 30.0


class ReadSlots:
    """gRPC reports no progress of a message, so the number of reads bounds their memory.

    Usually a message needs its slot for one turn of the loop. When calls wait, the longest-running read gives way.
    Slots go to connections in turn: a connection with a thousand idle calls delays others no more than one call.
    """

    def __init__(
        self, num_slots: int, *, grace_s: float, timeout_s: float, max_waiting: int, newest_first: bool = False
    ) -> None:
        """
        Args:
            grace_s: minimum time before a read gives way.
            timeout_s: limit on a read while no call waits.
            max_waiting: limit on waiting calls; beyond it the connection with most of them loses its oldest.
            newest_first: serve a connection's newest call first, so that under a flood some are on time.
        """
        self._num_free = num_slots
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._newest_first = newest_first
        # Start of each read, oldest first.
        self._reads: dict[asyncio.Timeout, float] = {}
        # By connection, the next one first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_waiting = 0

    async def read(self, receive: Callable[[], Awaitable[T]], connection: str = "") -> T:
        """Raises OverloadedError: no slot, or the message gave way; RequestTimeoutError: the message did not come."""
        await self._take_slot(connection)
        began = asyncio.get_running_loop().time()
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                self._reads[timeout] = began
                self._hurry_oldest()
                return await receive()
        except TimeoutError:
            if asyncio.get_running_loop().time() - began < self._timeout_s:
                raise OverloadedError("the request came so slowly that it had to give way to others") from None
            raise RequestTimeoutError(f"the request did not come within {self._timeout_s:g} s") from None
        finally:
            self._reads.pop(timeout, None)
            self._free_slot()

    async def _take_slot(self, connection: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        if self._num_waiting >= self._max_waiting:
            longest = max(self._waiting, key=lambda waiting: len(self._waiting[waiting]))
            self._next_waiting(longest, oldest=True).set_exception(_no_slot())
        slot = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(connection, deque()).append(slot)
        self._num_waiting += 1
        self._hurry_oldest()
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                await slot
        except BaseException as error:
            if slot in self._waiting.get(connection, ()):
                self._waiting[connection].remove(slot)
                self._num_waiting -= 1
                if not self._waiting[connection]:
                    del self._waiting[connection]
            elif not slot.cancelled() and slot.exception() is None:
                # It got a slot while being cancelled.
                self._free_slot()
            if isinstance(error, TimeoutError):
                raise _no_slot() from None
            raise

    def _free_slot(self) -> None:
        while self._waiting:
            slot = self._next_waiting(next(iter(self._waiting)), oldest=not self._newest_first)
            if not slot.done():
                slot.set_result(None)
                self._hurry_oldest()
                return
        self._num_free += 1

    def _next_waiting(self, connection: str, *, oldest: bool) -> asyncio.Future[None]:
        queue = self._waiting.pop(connection)
        slot = queue.popleft() if oldest else queue.pop()
        self._num_waiting -= 1
        if queue:
            self._waiting[connection] = queue
        return slot

    def _hurry_oldest(self) -> None:
        if self._waiting and self._reads:
            oldest, began = next(iter(self._reads.items()))
            when = oldest.when()
            if when is not None and not oldest.expired():
                oldest.reschedule(min(when, began + self._grace_s))


def _no_slot() -> OverloadedError:
    return OverloadedError("too many requests are on their way in; try again later")

"""How many messages may be on their way in at once."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tandem.router.errors import OverloadedError, RequestTimeoutError

T = TypeVar("T")

# A call waits so long for a place.
WAIT_TIMEOUT_S = 30.0


class ReadSlots:
    """gRPC hands over a message when all of it is there and does not say how far it has come, so the number of those
    that are read bounds the memory they take. A message mostly comes with its call: a slot is needed for a turn of the
    loop. Where others wait for a slot, the message that has been on its way for longest gives way.

    Slots go to connections in turn: one that opens a thousand calls and says nothing keeps others waiting no longer
    than one that opens a single one.
    """

    def __init__(
        self, num_slots: int, *, grace_s: float, timeout_s: float, max_waiting: int, newest_first: bool = False
    ) -> None:
        """
        Args:
            grace_s: nobody gives way earlier.
            timeout_s: how long a message may take to come where nobody waits for its place.
            max_waiting: for a slot; beyond, of the connection with the most of them the one that has waited for longest
                is refused.
            newest_first: of a connection's, who waits for longest is served last: under a flood some are served at
                once, not all late.
        """
        self._num_free = num_slots
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._newest_first = newest_first
        # When each began, oldest first.
        self._reads: dict[asyncio.Timeout, float] = {}
        # By connection, the one whose turn is next first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_waiting = 0

    async def read(self, receive: Callable[[], Awaitable[T]], connection: str = "") -> T:
        """
        Args:
            connection: on which the message comes.

        Raises:
            OverloadedError: there was no slot, or the message gave way to others.
            RequestTimeoutError: the message did not come.
        """
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
        """Raises OverloadedError."""
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
                # It was given a slot while it was being cancelled.
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
        """Takes one of a connection's out of the line; its next one stands behind those of all others."""
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

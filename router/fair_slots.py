"""Slots for costly work, which waiting clients get in turns."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_WAITING_PER_CLIENT = 256


class FairSlots:
    """Limits concurrent work. Clients take turns, so one client's many requests delay another's by one turn.

    Belongs to the router's loop.
    """

    def __init__(self, num_slots: int, max_per_client: int | None = None) -> None:
        """Args: max_per_client: below `num_slots`, another client finds a slot at once."""
        self._num_free = num_slots
        self._max_per_client = max_per_client or num_slots
        self._num_held: Counter[str] = Counter()
        # The client whose last turn is the longest ago comes first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Waits for a slot. Raises TimeoutError if too many requests of this client wait."""
        await self._acquire(client)
        try:
            yield
        finally:
            self._release(client)

    def num_waiting(self, client: str) -> int:
        return len(self._waiting.get(client, ()))

    async def _acquire(self, client: str) -> None:
        if self._num_free and client not in self._waiting and self._has_share(client):
            self._take(client)
            return
        waiting = self._waiting.setdefault(client, deque())
        if len(waiting) >= MAX_WAITING_PER_CLIENT:
            raise TimeoutError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(client)
            else:
                self._forget(client, turn)
            raise

    def _has_share(self, client: str) -> bool:
        return self._num_held[client] < self._max_per_client

    def _take(self, client: str) -> None:
        self._num_free -= 1
        self._num_held[client] += 1

    def _release(self, client: str) -> None:
        self._num_free += 1
        self._num_held[client] -= 1
        if not self._num_held[client]:
            del self._num_held[client]
        while self._num_free and (next_client := next(filter(self._has_share, self._waiting), None)) is not None:
            turn = self._waiting[next_client][0]
            self._waiting.move_to_end(next_client)
            self._forget(next_client, turn)
            if not turn.done():
                self._take(next_client)
                turn.set_result(None)

    def _forget(self, client: str, turn: "asyncio.Future[None]") -> None:
        waiting = self._waiting.get(client, deque())
        if turn in waiting:
            waiting.remove(turn)
        if not waiting:
            self._waiting.pop(client, None)

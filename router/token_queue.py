"""Tokens on their way from the workers' messages to a client."""

import asyncio


class TokenQueue:
    """Tokens of one request that its client has not been given yet. An ActiveRequest owns it: the router puts tokens in
    as workers send them, and a Generation takes them out. What comes while the client is not reading goes out together.
    """

    __slots__ = ("_is_ended", "_token_ids", "_waiter")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put_tokens(self, token_ids: list[int]) -> None:
        self._token_ids += token_ids
        self._wake()

    def put_end(self) -> None:
        """No more will come."""
        self._is_ended = True
        self._wake()

    async def next_tokens(self) -> list[int] | None:
        """All tokens that have come since the last call, at least one; None once there will be no more."""
        while not self._token_ids and not self._is_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take_tokens() or None

    def take_tokens(self) -> list[int]:
        """All tokens that have come since the last call, perhaps none."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids

    @property
    def is_exhausted(self) -> bool:
        """Whether all has been taken, and no more will come."""
        return self._is_ended and not self._token_ids

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

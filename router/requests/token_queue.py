"""Tokens on their way from the workers' messages to a client."""

import asyncio
from collections.abc import Callable


class TokenQueue:
    """Tokens of one request that its client has not been given yet. An ActiveRequest owns it: the router puts tokens in
    as workers send them, and a Generation takes them out. What comes while the client is not reading goes out together.
    """

    __slots__ = ("_call", "_is_ended", "_loop", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._is_ended = False
        self._call: Callable[[], None] | None = None
        # On which it is called.
        self._loop: asyncio.AbstractEventLoop | None = None

    def put_tokens(self, token_ids: list[int]) -> None:
        self._token_ids += token_ids
        self._wake()

    def put_end(self) -> None:
        """No more will come."""
        self._is_ended = True
        self._wake()

    def call_at_news(self, call: Callable[[], None]) -> None:
        """Has the running loop call this, once, after the next tokens or the end have come. Who asks last is called."""
        self._call, self._loop = call, asyncio.get_running_loop()

    async def news(self) -> None:
        """Returns when tokens or the end have come since this was called."""
        come = asyncio.get_running_loop().create_future()
        # One whose reader has left is cancelled.
        self.call_at_news(lambda: None if come.done() else come.set_result(None))
        await come

    def take_tokens(self) -> list[int]:
        """All tokens that have come since the last call, perhaps none."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids

    @property
    def is_exhausted(self) -> bool:
        """Whether all has been taken, and no more will come."""
        return self._is_ended and not self._token_ids

    def _wake(self) -> None:
        if self._call is not None:
            assert self._loop is not None
            # Whoever puts tokens in for many requests must not pay for what one of them does with its own.
            self._loop.call_soon(self._call)
            self._call = None

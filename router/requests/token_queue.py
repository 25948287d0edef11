"""Tokens on their way from the workers' messages to a client."""

import asyncio
from collections.abc import Callable


class TokenQueue:
    """Tokens of one request that its Generation has not taken."""

    __slots__ = ("_call", "_is_ended", "_loop", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._is_ended = False
        self._call: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def put_tokens(self, token_ids: list[int]) -> None:
        self._token_ids += token_ids
        self._wake()

    def put_end(self) -> None:
        self._is_ended = True
        self._wake()

    def call_at_news(self, call: Callable[[], None]) -> None:
        """Has the running loop call this once, at the next tokens or the end. A later call replaces it."""
        self._call, self._loop = call, asyncio.get_running_loop()

    async def news(self) -> None:
        come = asyncio.get_running_loop().create_future()
        # A reader that left has cancelled its future.
        self.call_at_news(lambda: None if come.done() else come.set_result(None))
        await come

    def take_tokens(self, max_tokens: int) -> list[int]:
        token_ids, self._token_ids = self._token_ids[:max_tokens], self._token_ids[max_tokens:]
        return token_ids

    @property
    def has_tokens(self) -> bool:
        return bool(self._token_ids)

    @property
    def is_exhausted(self) -> bool:
        return self._is_ended and not self._token_ids

    def _wake(self) -> None:
        if self._call is not None:
            assert self._loop is not None
            # The caller serves many requests and must not run one reader's work.
            self._loop.call_soon(self._call)
            self._call = None

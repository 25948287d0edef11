"""Writes a generation's pieces, each as soon as it is there and the previous one is taken.

A task that writes in a loop wakes twice per token, and each time resumes a chain of coroutines in our code and the
server's. Here plain callbacks do both, and the task only waits for the end.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.router.frontends.generation import Generation, Piece


class PieceWriter:
    """Writes one generation, once."""

    def __init__(self, generation: Generation, write: Callable[[Piece], Coroutine[Any, Any, None]]) -> None:
        """Args: write: writes a piece; returns when the next one may be written."""
        self._generation = generation
        self._write = write
        self._writing: Coroutine[Any, Any, None] | None = None
        self._is_last = False
        self._over: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Returns when the last piece is written. Raises the errors of Generation.take_piece and `write`."""
        self._over = asyncio.get_running_loop().create_future()
        try:
            self._go_on()
            await self._over
        finally:
            # A stored error's traceback refers to this object: break the cycle instead of leaving it to the collector.
            self._over = None
            if self._writing is not None:
                self._writing.close()

    def _go_on(self, _: object = None) -> None:
        """Called when there may be more to write, or when the last piece may have been taken."""
        if self._over is None or self._over.done():
            return
        try:
            while self._writing is None or self._is_written(self._writing):
                if self._is_last:
                    self._over.set_result(None)
                    return
                piece = self._generation.take_piece()
                if piece is None:
                    self._generation.call_at_news(self._go_on)
                    return
                self._is_last = bool(piece.finish_reason)
                self._writing = self._write(piece)
        except (Exception, asyncio.CancelledError) as error:
            self._over.set_exception(error)

    def _is_written(self, writing: Coroutine[Any, Any, None]) -> bool:
        """Returns whether the piece is written; if not, `_go_on` is called later."""
        try:
            waited_for = writing.send(None)
        except StopIteration:
            self._writing = None
            return True
        if waited_for is None:
            # A bare yield to the loop.
            asyncio.get_running_loop().call_soon(self._go_on)
            return False
        # A coroutine marks the future that it awaits for its task; here no task does.
        waited_for._asyncio_future_blocking = False
        waited_for.add_done_callback(self._go_on)
        return False

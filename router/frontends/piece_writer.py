"""Writes a generation's pieces, each as soon as the previous one is taken.

A task that writes in a loop wakes twice per token, each time through a chain of coroutines. Here plain callbacks do
both.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.router.frontends.generation import Generation, Piece


class PieceWriter:
    def __init__(self, generation: Generation, write: Callable[[Piece], Coroutine[Any, Any, None]]) -> None:
        """Args: write: returns when the next piece may be written."""
        self._generation = generation
        self._write = write
        self._writing: Coroutine[Any, Any, None] | None = None
        self._is_last = False
        self._over: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Raises as Generation.take_piece and `write`."""
        self._over = asyncio.get_running_loop().create_future()
        try:
            self._go_on()
            await self._over
        finally:
            # A stored error's traceback refers to this object: break the cycle.
            self._over = None
            if self._writing is not None:
                self._writing.close()

    def _go_on(self, _: object = None) -> None:
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

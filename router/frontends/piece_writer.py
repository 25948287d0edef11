"""A generation's pieces on their way out, each as soon as it is there and the one before has been taken.

A task that writes in a loop is woken twice for each token, when it has come and when it is written, and is resumed each
time through all that awaits it, in our code and in that of the server. Here plain callbacks do both; the task waits for
the end alone.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tandem.router.frontends.generation import Generation, Piece


class PieceWriter:
    """Writes one generation, once. The call that is answered owns it."""

    def __init__(self, generation: Generation, write: Callable[[Piece], Coroutine[Any, Any, None]]) -> None:
        """Args: write: writes a piece; the next one may be written when it has returned."""
        self._generation = generation
        self._write = write
        self._writing: Coroutine[Any, Any, None] | None = None
        self._is_last = False
        self._over: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Returns when the last piece is written. Raises what Generation.take_piece and `write` raise."""
        self._over = asyncio.get_running_loop().create_future()
        try:
            self._go_on()
            await self._over
        finally:
            # An error that it holds refers to this object by its traceback: such a cycle would wait for the collector.
            self._over = None
            if self._writing is not None:
                self._writing.close()

    def _go_on(self, _: object = None) -> None:
        """To be called when there may be more to write, and when gRPC or HTTP may have taken what was written."""
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
        """Whether this has been written; if not, `_go_on` is called when it may have been."""
        try:
            waited_for = writing.send(None)
        except StopIteration:
            self._writing = None
            return True
        if waited_for is None:
            # It only lets others have their turn.
            asyncio.get_running_loop().call_soon(self._go_on)
            return False
        # By this mark a coroutine hands the future that it awaits to whoever runs it, which is a task elsewhere.
        waited_for._asyncio_future_blocking = False
        waited_for.add_done_callback(self._go_on)
        return False

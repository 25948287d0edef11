"""A thread with an asyncio loop that other threads hand work to."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0


class LoopThread:
    """Attributes: loop: set once `start` has returned."""

    def __init__(self, make_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> None:
        self._make_loop = make_loop
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name="asyncio", daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._thread.start()
        self.loop = self._started.result(START_TIMEOUT_S)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop from another thread. Raises TimeoutError after cancelling it."""
        assert self.loop is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread; running tasks are dropped."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        loop = self._make_loop()
        asyncio.set_event_loop(loop)
        loop.call_soon(self._started.set_result, loop)
        loop.run_forever()

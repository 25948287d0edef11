"""Runs work that grows with a request's size beside the loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tandem.router.errors import OverloadedError
from tandem.router.fair_slots import FairSlots

P = ParamSpec("P")
T = TypeVar("T")

# Parsed and validated within 3 ms. A thread's round trip takes 0.1 ms.
MAX_INLINE_BYTES = 2**14
TIMEOUT_S = 60.0


class OffLoop:
    """One thread, because each thread that wants the interpreter's lock delays the loop. Clients take turns."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "parse")
        self._slots = FairSlots(1)

    async def run(self, client: str, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function`, at once for small requests. Raises OverloadedError after TIMEOUT_S, and what it raises."""
        if num_bytes <= MAX_INLINE_BYTES:
            return function(*args, **kwargs)
        try:
            async with asyncio.timeout(TIMEOUT_S), self._slots.hold(client):
                return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))
        except TimeoutError as error:
            raise OverloadedError("too many large bodies wait to be read; try again later") from error

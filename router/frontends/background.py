"""Responses in progress that no client waits for."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tandem.router.errors import OverloadedError
from tandem.router.frontends.kept_responses import KeptResponse

# Each is also a request in hand of its key and of the router.
MAX_RUNS = 1024


@dataclass(eq=False, slots=True)
class _Run:
    """Attributes: look: returns the response so far."""

    key: str
    look: Callable[[], KeptResponse]
    task: asyncio.Task[None]


class BackgroundResponses:
    """One router's responses in progress. Belongs to the router's loop."""

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._max_runs = max_runs
        self._runs: dict[str, _Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def check_room(self) -> None:
        """Raises OverloadedError."""
        if len(self._runs) >= self._max_runs:
            raise OverloadedError(f"{len(self._runs)} responses are in progress in the background; try again later")

    def start(
        self, response_id: str, key: str, look: Callable[[], KeptResponse], work: Coroutine[Any, Any, None]
    ) -> None:
        """Args: work: computes the response and keeps it, also when it is cancelled."""
        task = asyncio.create_task(work)
        self._runs[response_id] = _Run(key, look, task)
        task.add_done_callback(lambda _: self._runs.pop(response_id))

    def find(self, response_id: str, key: str) -> KeptResponse | None:
        """Returns a response in progress, without its conversation."""
        run = self._runs.get(response_id)
        return run.look() if run is not None and run.key == key else None

    async def cancel(self, response_id: str, key: str) -> None:
        """Returns once the response is kept. Does nothing if it is not in progress."""
        run = self._runs.get(response_id)
        if run is not None and run.key == key:
            run.task.cancel()
            await asyncio.wait((run.task,))

    async def close(self) -> None:
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

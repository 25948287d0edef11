"""What a worker and its routers tell each other of adapters, on the asyncio thread."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from tandem.adapters import AdapterBook, AdapterEntry, AdapterRef
from tandem.messages import AdapterChecked, AdapterPlaces, Adapters, CheckAdapter, WorkerMessage
from tandem.worker.events import AdaptersListed, Event

logger = logging.getLogger(__name__)


def takes_none(path: str) -> AdapterRef:
    """The check of a worker without adapters."""
    raise ValueError("the workers take no adapters: start the cluster with --max-loras")


class AdapterExchange:
    """Keeps the routers' names, so that a router that was away learns them here, and checks adapters for routers.

    The worker itself needs no names: each request brings its adapter along.
    """

    def __init__(self, post: Callable[[Event], None], check: Callable[[str], AdapterRef] = takes_none) -> None:
        """
        Args:
            check: reads the adapter of a path, in a thread. Raises ValueError: it cannot be served.
        """
        self._post = post
        self._check = check
        self._book = AdapterBook()
        self._places = AdapterPlaces((), ())
        self._checks: set[asyncio.Task[None]] = set()

    def greeting(self) -> list[WorkerMessage]:
        """Returns the messages to a router that has welcomed this worker. It must know the names before it can place a
        request. A worker without adapters says nothing."""
        if self._check is takes_none:
            return []
        return [Adapters(self._book.entries()), self._places]

    def note_places(self, places: AdapterPlaces) -> None:
        self._places = places

    def merge(self, message: Adapters) -> Sequence[AdapterEntry]:
        """Takes a router's names. Returns those that were news."""
        news = self._book.merge(message.entries)
        self._post(AdaptersListed(self._book.content_hashes()))
        return news

    def check(self, message: CheckAdapter, send: Callable[[Sequence[WorkerMessage]], None]) -> None:
        """Checks an adapter beside the loop, and sends the answer."""
        task = asyncio.create_task(self._answer(message, send))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _answer(self, message: CheckAdapter, send: Callable[[Sequence[WorkerMessage]], None]) -> None:
        try:
            answer = AdapterChecked(message.check_id, await asyncio.to_thread(self._check, message.path))
        except ValueError as error:
            answer = AdapterChecked(message.check_id, None, str(error))
        except Exception as error:
            # The file is a stranger's: no content of it may end the worker.
            logger.exception("the check of adapter %s failed", message.path)
            answer = AdapterChecked(message.check_id, None, f"{message.path} cannot be read: {error}")
        send([answer])

"""Frames for those who watch a cluster: one a second, made once for all of them, and none while nobody watches."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_VIEWERS = 32


class Frames(Protocol):
    """Where frames come from: router/live/snapshot.py."""

    def sample(self) -> None: ...

    def changes(self) -> str: ...

    def everything(self) -> str: ...

    def mark_told(self) -> None: ...


class TooManyViewersError(Exception):
    """MAX_VIEWERS watch already."""


class LiveFeed:
    """Belongs to the router's loop.

    Attributes:
        num_viewers: that watch now.
    """

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self.num_viewers = 0
        self._number = 0
        self._changes = ""
        # Everything up to the turn of this number, for all who begin within it.
        self._everything: tuple[int, str] = (-1, "")
        self._turn = asyncio.Event()
        self._is_closed = False

    async def run(self) -> None:
        """Makes a frame each second, until cancelled. Whatever is wrong with one, requests are served without it."""
        is_well = True
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self.tick()
            except Exception:
                if is_well:
                    logger.exception("the live page could not be fed")
                is_well = False
            else:
                is_well = True

    def tick(self) -> None:
        """A second has passed."""
        self._frames.sample()
        self._number += 1
        if self.num_viewers:
            self._changes = self._frames.changes()
        # What comes from now on is told by the next frame; who begins meanwhile is told some of it twice.
        self._frames.mark_told()
        self._wake()

    def close(self) -> None:
        """Ends all streams: the router stops."""
        self._is_closed = True
        self._wake()

    async def watch(self) -> AsyncGenerator[str]:
        """A viewer's frames. One who is slow to take them misses some, and then gets everything again: nothing waits
        for it.

        Raises:
            TooManyViewersError: at the first frame.
        """
        with self._place():
            seen = -1
            while not self._is_closed:
                if seen == self._number:
                    await self._turn.wait()
                    continue
                is_next = seen >= 0 and seen + 1 == self._number
                frame = self._changes if is_next else self._whole()
                seen = self._number
                yield frame

    def _whole(self) -> str:
        number, frame = self._everything
        if number != self._number:
            frame = self._frames.everything()
            self._everything = self._number, frame
        return frame

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self.num_viewers >= MAX_VIEWERS:
            raise TooManyViewersError
        self.num_viewers += 1
        try:
            yield
        finally:
            self.num_viewers -= 1

    def _wake(self) -> None:
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

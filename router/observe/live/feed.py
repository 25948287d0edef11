"""Frames for those who watch a cluster: one a second, made once for all of them, and none while nobody watches."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Protocol

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_VIEWERS = 32


class Frame(Protocol):
    def seen_by(self, key: str) -> str: ...


class Frames(Protocol):
    """Where frames come from: router/observe/live/snapshot.py."""

    def sample(self) -> None: ...

    def changes(self) -> Frame: ...

    def everything(self) -> Frame: ...

    def mark_told(self) -> None: ...


class TooManyViewersError(Exception):
    """As many watch already as may, of all or of one key; the message says so."""


class LiveFeed:
    """Belongs to the router's loop.

    Attributes:
        num_viewers: that watch now.
    """

    def __init__(self, frames: Frames, num_keys: int = 0) -> None:
        """Args: num_keys: where there are several, one may have half of the places."""
        self._frames = frames
        self.num_viewers = 0
        self._max_per_key = MAX_VIEWERS // 2 if num_keys > 1 else MAX_VIEWERS
        self._num_of_key: Counter[str] = Counter()
        self._number = 0
        self._changes: Frame | None = None
        # Everything up to the turn of this number, for all who begin within it.
        self._everything: tuple[int, Frame] | None = None
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

    async def watch(self, key: str = "") -> AsyncGenerator[str]:
        """A viewer's frames. One who is slow to take them misses some, and then gets everything again: nothing waits
        for it.

        Args:
            key: the viewer's, "" where there are no keys.

        Raises:
            TooManyViewersError: at the first frame.
        """
        with self._place(key):
            seen = -1
            while not self._is_closed:
                if seen == self._number:
                    await self._turn.wait()
                    continue
                is_next = seen >= 0 and seen + 1 == self._number
                frame = self._changes if is_next and self._changes is not None else self._whole()
                seen = self._number
                yield frame.seen_by(key)

    def _whole(self) -> Frame:
        if self._everything is None or self._everything[0] != self._number:
            self._everything = self._number, self._frames.everything()
        return self._everything[1]

    @contextmanager
    def _place(self, key: str) -> Iterator[None]:
        if self.num_viewers >= MAX_VIEWERS:
            raise TooManyViewersError(f"{self.num_viewers} watch already")
        if self._num_of_key[key] >= self._max_per_key:
            raise TooManyViewersError(f"{self._num_of_key[key]} watch with this key already")
        self.num_viewers += 1
        self._num_of_key[key] += 1
        try:
            yield
        finally:
            self.num_viewers -= 1
            self._num_of_key[key] -= 1

    def _wake(self) -> None:
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

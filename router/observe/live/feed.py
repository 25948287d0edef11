"""Frames for viewers of the live page, one a second."""

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
    """For example a SnapshotBuilder (router/observe/live/snapshot.py)."""

    def sample(self) -> None: ...

    def changes(self) -> Frame: ...

    def everything(self) -> Frame: ...

    def mark_told(self) -> None: ...


class TooManyViewersError(Exception):
    """The limit of viewers, of all keys or of one, is reached."""


class LiveFeed:
    """Attributes: num_keys: with several API keys, one may have half of the places."""

    def __init__(self, frames: Frames, num_keys: int = 0) -> None:
        self._frames = frames
        self.num_keys = num_keys
        self.num_viewers = 0
        self._num_of_key: Counter[str] = Counter()
        self._number = 0
        self._changes: Frame | None = None
        # Full state of this second, by its number, for new viewers.
        self._everything: tuple[int, Frame] | None = None
        self._turn = asyncio.Event()
        self._is_closed = False

    async def run(self) -> None:
        """Makes a frame each second until cancelled. Errors are only logged."""
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
        self._frames.sample()
        self._number += 1
        if self.num_viewers:
            self._changes = self._frames.changes()
        # Later events go into the next frame. A viewer that starts before it gets some of them twice.
        self._frames.mark_told()
        self._wake()

    def close(self) -> None:
        self._is_closed = True
        self._wake()

    async def watch(self, key: str = "") -> AsyncGenerator[str]:
        """A slow viewer misses frames and then gets the full state.

        Args:
            key: the viewer's key, or "" without keys.

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
        if self._num_of_key[key] >= (MAX_VIEWERS // 2 if self.num_keys > 1 else MAX_VIEWERS):
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

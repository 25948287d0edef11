"""Files of keys and certificates that may be replaced while a process runs."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

# Seconds between two looks.
WATCH_INTERVAL_S = 2.0
_Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Loads files again when one of them has changed. What cannot be loaded is named once and leaves all as it was."""

    def __init__(self, files: Sequence[str], load: Callable[[], None], what: str) -> None:
        """
        Args:
            load: takes the current content; raises ValueError if it is unusable.
            what: they hold, for the log.
        """
        self._files = [Path(file) for file in files if file]
        self._load = load
        self._what = what
        self._stamp: _Stamp | None = None
        # The last one logged since the last success.
        self._error = ""

    def load(self) -> None:
        """Load at the start. Raises ValueError."""
        self._stamp = self._read_stamp()
        self._load()

    def poll(self) -> None:
        """Load what has changed since the last look. Reads files: for a thread other than a busy loop's."""
        if (stamp := self._read_stamp()) == self._stamp:
            return
        # First: a file that is replaced meanwhile is seen at the next look.
        self._stamp = stamp
        try:
            self._load()
        except ValueError as error:
            # Try again at the next look: the file may not be whole or valid yet.
            self._stamp = None
            if str(error) != self._error:
                self._error = str(error)
                logger.error("%s stay as they were: %s", self._what, error)
        else:
            self._error = ""
            logger.info("%s were loaded again", self._what)

    def _read_stamp(self) -> _Stamp:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        # Follows links, which Kubernetes replaces in place of files.
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def poll_all(watched: Sequence[WatchedFiles]) -> None:
    for files in watched:
        files.poll()


async def watch(watched: Sequence[WatchedFiles], must_look: asyncio.Event | None = None) -> None:
    """Look every WATCH_INTERVAL_S, and when `must_look` is set, until cancelled."""
    must_look = must_look or asyncio.Event()
    while watched:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_INTERVAL_S):
                await must_look.wait()
        must_look.clear()
        await asyncio.to_thread(poll_all, watched)

"""The newest keys of the key file, for processes that start again while the file cannot be read."""

import threading

from tandem import watched_files
from tandem.key_file import KeyFile
from tandem.watched_files import WatchedFiles


class NewestKeys:
    """Reads the file on a thread of its own: a dead network file system must not stop supervision."""

    def __init__(self, key_file: KeyFile) -> None:
        self._key_file = key_file
        self._files = WatchedFiles([key_file.path], self._load, "the API keys of processes that start again")
        self._newest: tuple[str, ...] | None = None
        self._lock = threading.Lock()
        self._must_end = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="newest-keys", daemon=True).start()

    def end(self) -> None:
        """Returns at once."""
        self._must_end.set()

    def take(self) -> tuple[str, ...] | None:
        """Returns all keys, or None if there are none since the last call."""
        with self._lock:
            newest, self._newest = self._newest, None
        return newest

    def _load(self) -> None:
        keys = self._key_file.read()
        with self._lock:
            self._newest = keys

    def _watch(self) -> None:
        while not self._must_end.is_set():
            self._files.poll()
            self._must_end.wait(watched_files.WATCH_INTERVAL_S)

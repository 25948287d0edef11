"""The event behind an actor's `wait_stopped`."""

import threading


class StopWait:
    """An event with one waiter at a time.

    A new waiter releases the previous one: after a lost connection, that call would block an actor thread forever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = threading.Event()
        self._is_over = False

    def wait(self) -> None:
        mine = threading.Event()
        with self._lock:
            before, self._latest = self._latest, mine
            if self._is_over:
                return
        before.set()
        mine.wait()

    def set(self) -> None:
        with self._lock:
            self._is_over = True
            self._latest.set()

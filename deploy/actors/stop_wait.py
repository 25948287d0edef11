"""What an actor's `wait_stopped` waits for."""

import threading


class StopWait:
    """One waits at a time: whoever asks again, because it could not be reached for a while, takes the place of the one
    before, which would occupy one of the actor's threads for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = threading.Event()
        self._is_over = False

    def wait(self) -> None:
        """Returns after `set`, or when it is called again."""
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

"""Starts the workers of one GPU one after another: each takes what the device's free memory loses for its own."""

import fcntl
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from tandem.private_directory import check_private

logger = logging.getLogger(__name__)

# Below the launcher's limit for a start.
TURN_TIMEOUT_S = 1500.0
POLL_INTERVAL_S = 0.05


class GpuTurn:
    """A worker's turn on its GPU, as a context manager that ends it. The kernel ends a dead process's turn."""

    def __init__(self, directory: Path, on_wait: Callable[[], None], timeout_s: float = TURN_TIMEOUT_S) -> None:
        """
        Args:
            directory: private to this user, and the same for all workers of this host.
            on_wait: called if another worker has the turn.
        """
        self._directory = directory
        self._on_wait = on_wait
        self._timeout_s = timeout_s
        self._held: int | None = None

    def take(self, pci_id: str) -> None:
        """Waits for the turn on a GPU.

        Raises:
            TimeoutError: the other workers' starts did not end.
            OSError: the directory is unusable.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(self._directory)
        self._held = os.open(self._directory / f"gpu-{pci_id}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        began = time.monotonic()
        is_waiting = False
        while not self._try():
            if time.monotonic() > began + self._timeout_s:
                self.end()
                raise TimeoutError(
                    f"another worker on the GPU {pci_id} has not ended its start within {self._timeout_s:g} s"
                )
            if not is_waiting:
                is_waiting = True
                self._on_wait()
            time.sleep(POLL_INTERVAL_S)
        if is_waiting:
            logger.info("waited %.1f s for other workers on the GPU %s", time.monotonic() - began, pci_id)

    def end(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __enter__(self) -> "GpuTurn":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _try(self) -> bool:
        assert self._held is not None
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

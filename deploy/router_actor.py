"""The router as a Ray actor. Nothing here imports torch."""

import logging
import threading

from router.process import RouterAddresses, RouterProcess
from tandem.config import RouterConfig


class RouterActor:
    """Starts, stops and watches the process; no request ever crosses a Ray call."""

    def __init__(self, config: RouterConfig) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        self._process = RouterProcess(config)
        self._stopped = threading.Event()

    def start(self) -> RouterAddresses:
        return self._process.start()

    def wait_stopped(self) -> None:
        """Returns after stop; the caller sees an error at once if the process dies."""
        self._stopped.wait()

    def stop(self) -> None:
        self._process.stop()
        self._stopped.set()

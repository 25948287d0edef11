"""A router as a Ray actor. Nothing here imports torch."""

import threading

from deploy.garbage import collect_young_seldom, freeze_objects
from router.config import RouterAddresses, RouterConfig
from router.process import RouterProcess
from tandem import logs


class RouterActor:
    """Starts, stops and watches the process; no request ever crosses a Ray call."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._process = RouterProcess(config)
        self._stopped = threading.Event()

    def start(self) -> RouterAddresses:
        logs.configure(self._config.router_id, self._config.log)
        addresses = self._process.start()
        freeze_objects()
        collect_young_seldom()
        return addresses

    def open_shared_ports(self) -> None:
        """Returns when clients are let in at the ports that all routers share; raises ValueError if one is taken."""
        self._process.open_shared_ports()

    def probe(self) -> None:
        """Returns if the router's loop turns; raises TimeoutError if it does not."""
        self._process.probe()

    def wait_stopped(self) -> None:
        """Returns after stop; the caller sees an error at once if the process dies."""
        self._stopped.wait()

    def drain(self, timeout_s: float) -> int:
        return self._process.drain(timeout_s)

    def stop(self) -> None:
        self._process.stop()
        self._stopped.set()

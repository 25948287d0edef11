"""A router as a Ray actor. Nothing here imports torch; the launcher imports this too, without what a router needs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tandem import logs
from tandem.deploy.actors.stop_wait import StopWait
from tandem.deploy.host.garbage import collect_young_seldom, freeze_objects, no_collections
from tandem.deploy.on_ray.sealed_actor import SealedActor
from tandem.router.config import RouterAddresses, RouterConfig

if TYPE_CHECKING:
    from tandem.router.process import RouterProcess
    from tandem.router.workers.leans import Lean, RouterDemand

# Ray sends an answer of less than 100 KiB along with the word that there is one. What is larger would be fetched later,
# from a node that may be lost by then, and whoever supervises would wait for it.
MAX_LINES_BYTES = 64 << 10


class RouterActor(SealedActor[RouterConfig]):
    """Starts, stops and watches the process; no request ever crosses a Ray call."""

    def __init__(self, config: RouterConfig | None) -> None:
        super().__init__(config)
        # It is there once a router's imports are over.
        self._process: RouterProcess | None = None
        self._stopped = StopWait()

    def start(self, *_waited_for: None) -> RouterAddresses:
        """Opens its ports. Args: _waited_for: what Ray is to have done before."""
        config = self._wait_order()
        logs.configure(config.router_id, config.log)
        with no_collections():
            from tandem.router.process import RouterProcess
        process = self._process = RouterProcess(config)
        addresses = process.start()
        freeze_objects()
        collect_young_seldom()
        return addresses

    def open_shared_ports(self) -> None:
        """Returns when clients are let in at the ports that all routers share; raises ValueError if one is taken."""
        assert self._process is not None
        self._process.open_shared_ports()

    def probe(self) -> list[str]:
        """Returns if the router's loop turns, with the lines about requests since it was last asked, where these are
        not sent, or the first of many; raises TimeoutError if it does not turn."""
        assert self._process is not None
        self._process.probe()
        return self._process.take_request_lines(MAX_LINES_BYTES)

    def set_workers(self, planned: Mapping[str, str]) -> dict[str, int]:
        """As Router.set_workers: {} if it has yet to start, and asks again."""
        return self._process.set_workers(planned) if self._process is not None else {}

    def exchange_leans(self, leans: "Mapping[str, Lean]") -> "RouterDemand | None":
        """As Router.exchange_leans: None if it has yet to start, and is told again."""
        return self._process.exchange_leans(leans) if self._process is not None else None

    def wait_stopped(self) -> None:
        """Returns after stop, or when it is called again; the caller sees an error at once if the process dies."""
        self._stopped.wait()

    def drain(self, timeout_s: float) -> int:
        return self._process.drain(timeout_s) if self._process is not None else 0

    def stop(self) -> list[str]:
        """Returns the last lines about requests, all of them."""
        if self._process is not None:
            self._process.stop()
        self._stopped.set()
        return self._process.take_request_lines() if self._process is not None else []

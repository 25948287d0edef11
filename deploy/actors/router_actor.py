"""A router as a Ray actor. The launcher imports this too, so the router's own imports come in `start`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tandem import logs
from tandem.deploy.actors.process_actor import ProcessActor
from tandem.garbage import collect_young_seldom, freeze_objects, no_collections
from tandem.router.config import RouterAddresses, RouterConfig

if TYPE_CHECKING:
    from tandem.router.process import RouterProcess
    from tandem.router.workers.leans import Lean, RouterDemand
    from tandem.router.workers.sizes import ClusterSize

# Ray sends results below 100 KiB inline. The supervision would fetch larger ones later, and block if the node is lost.
MAX_LINES_BYTES = 64 << 10


class RouterActor(ProcessActor[RouterConfig]):
    """Runs a router process."""

    order_type = RouterConfig
    _process: "RouterProcess | None"

    def start(self, *_waited_for: None) -> RouterAddresses:
        """Args: _waited_for: results of Ray calls that must finish first."""
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
        """Raises ValueError: a port is taken."""
        assert self._process is not None
        self._process.open_shared_ports()

    def probe(self) -> list[str]:
        """Returns the request lines kept since the last probe, up to MAX_LINES_BYTES.

        Raises:
            TimeoutError: the router's event loop does not run.
        """
        assert self._process is not None
        self._process.probe()
        return self._process.take_request_lines(MAX_LINES_BYTES)

    def set_workers(self, planned: Mapping[str, str]) -> dict[str, int]:
        """As Router.set_workers; {} before the start: ask again."""
        return self._process.set_workers(planned) if self._process is not None else {}

    def exchange_leans(self, leans: "Mapping[str, Lean]", size: "ClusterSize | None") -> "RouterDemand | None":
        """As Router.exchange_leans; None before the start: ask again."""
        return self._process.exchange_leans(leans, size) if self._process is not None else None

    def look_at_files(self) -> None:
        """As RouterProcess.look_at_files; a start reads the files anyway."""
        if self._process is not None:
            self._process.look_at_files()

    def leave(self) -> int:
        """As RouterProcess.leave."""
        return self._process.leave() if self._process is not None else 0

    def drain(self, timeout_s: float) -> int:
        return self._process.drain(timeout_s) if self._process is not None else 0

    def stop(self) -> list[str]:
        super().stop()
        return self._process.take_request_lines() if self._process is not None else []

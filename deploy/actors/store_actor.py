"""A page store as a Ray actor. The launcher imports this too, so the store's own imports come in `start`."""

from typing import TYPE_CHECKING

from tandem import logs
from tandem.deploy.actors.process_actor import ProcessActor
from tandem.garbage import collect_young_seldom, freeze_objects, no_collections
from tandem.pagestore.config import StoreConfig

if TYPE_CHECKING:
    from tandem.pagestore.server.process import StoreProcess


class StoreActor(ProcessActor[StoreConfig]):
    """Runs a store process."""

    order_type = StoreConfig
    _process: "StoreProcess | None"

    def start(self, *_waited_for: object) -> str:
        """As StoreProcess.start. Args: _waited_for: results of Ray calls that must finish first."""
        config = self._wait_order()
        logs.configure(config.store_id, config.log)
        with no_collections():
            from tandem.pagestore.server.process import StoreProcess
        process = self._process = StoreProcess(config)
        address = process.start()
        freeze_objects()
        collect_young_seldom()
        return address

    def probe(self) -> None:
        """Raises TimeoutError: the store's event loop does not run."""
        assert self._process is not None
        self._process.probe()

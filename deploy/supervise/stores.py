"""The page stores of a cluster. On a Ray of its own: this host's, whose region this process owns."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.config import ClusterTls, ClusterTlsFiles
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.host.ports import ClusterPorts
from tandem.deploy.host.run_record import region_path
from tandem.deploy.supervise.supervisor import ProcessKind
from tandem.engine.kvcache.host_memory import available_memory_bytes
from tandem.pagestore.config import StoreConfig
from tandem.pagestore.region import Region
from tandem.pagestore.region_holder import RegionHolder
from tandem.private_directory import check_private
from tandem.processes import ProcessId
from tandem.worker.config import StoreAccess

START_TIMEOUT_S = 60.0
PROBE_INTERVAL_S = 1.0
SILENCE_LIMIT_S = 5.0


class Stores:
    """The page stores of a cluster: none, or one on this host.

    Attributes:
        configs: configurations for the next start, by name.
        access: for the workers of a cluster on this host; None without a store.
        access_by_node: for the workers of a cluster over several nodes, by Ray address; {} without a store.
    """

    def __init__(self) -> None:
        self.configs: dict[str, StoreConfig] = {}
        self.access: StoreAccess | None = None
        self.access_by_node: dict[str, StoreAccess] = {}
        self._holder: RegionHolder | None = None
        self._region: Region | None = None

    @property
    def untouched_bytes(self) -> int:
        """Memory that the regions will still take."""
        return self._region.num_untouched_bytes if self._region is not None else 0

    def open(
        self,
        config: ClusterConfig,
        directory: Path,
        ports: ClusterPorts,
        cluster_token: str,
        namespace_secret: str = "",
    ) -> None:
        """Creates the region and serves it to processes that know the token. The region outlives all of them.

        Args:
            directory: private to the user.
            ports: one is reserved for the store.
            namespace_secret: of the folder of pages; "" without a disk.

        Raises:
            ValueError: there is not enough memory.
            OSError: the socket cannot be made.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
        path = region_path(directory, ProcessId.of(os.getpid()))
        self._region = Region.create(config.store_memory_bytes, available_memory_bytes())
        self._holder = RegionHolder(path, cluster_token, self._region)
        routers = tuple(addresses.cluster for addresses in ports.routers.values())
        store = config.store(
            "store-0", ports.store, routers, str(path), cluster_token, namespace_secret=namespace_secret
        )
        self.configs = {store.store_id: store}
        self.access = StoreAccess(ports.store, str(path), config.store_write_after)

    def config(
        self, name: str, num_restarts: int, cluster_tls: ClusterTls | ClusterTlsFiles | None, api_keys: Sequence[str]
    ) -> StoreConfig:
        """Returns the configuration of a start."""
        return replace(self.configs[name], num_restarts=num_restarts, cluster_tls=cluster_tls, api_keys=tuple(api_keys))

    def prepare_start(self, name: str) -> tuple[Any, ...]:
        """Returns references for the store's start to await."""
        return ()

    def kinds(self, start: Callable[[str], Any]) -> dict[str, ProcessKind]:
        """Returns the kind of each process, by name. Args: start: as ProcessKind.start."""
        kind = ProcessKind(
            start,
            lambda actor: actor.probe.remote(),
            lambda actor: actor.probe.remote(),
            probe_interval_s=PROBE_INTERVAL_S,
            silence_limit_s=SILENCE_LIMIT_S,
            start_limit_s=START_TIMEOUT_S,
        )
        return dict.fromkeys(self.configs, kind)

    def close(self) -> None:
        """Gives up the region, once the cluster's processes have ended."""
        if self._holder is not None:
            self._holder.close()
            self._holder = self._region = None

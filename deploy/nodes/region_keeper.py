"""Owns a node's region and reserves its store's port: both outlive the supervisor, the store and the workers."""

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tandem.deploy.host.ports import ReservedPorts
from tandem.deploy.host.run_record import default_directory, region_path, remove_stale_regions
from tandem.deploy.host.store_folder import open_disk
from tandem.deploy.on_ray.own_node import own_rack
from tandem.deploy.on_ray.sealed import seal
from tandem.deploy.on_ray.sealed_actor import SealedActor
from tandem.engine.kvcache.host_memory import available_memory_bytes
from tandem.pagestore.config import StoreDisk
from tandem.pagestore.region import Region
from tandem.pagestore.region_holder import RegionHolder
from tandem.pagestore.server.disk.folder import Folder
from tandem.pagestore.server.disk.secret import adopt_secret, namespace_secret
from tandem.private_directory import check_private
from tandem.processes import ProcessId


@dataclass(frozen=True)
class RegionOrder:
    """
    Attributes:
        address: of the store's port, "host:port"; port 0: any free port.
        socket: path of an earlier holder's socket; "": a new one.
        disk: the store's; None without one.
        namespace_secret: what the folder of `disk` takes as its secret; "": it keeps its own.
    """

    num_bytes: int
    address: str
    socket: str
    cluster_token: str = field(repr=False)
    disk: StoreDisk | None = None
    namespace_secret: str = field(default="", repr=False)


class KeptRegion(NamedTuple):
    """
    Attributes:
        address: of the store's port.
        socket: path of the holder's socket.
        rack: of the node; "" if unknown.
        folder: random name of the folder of pages; "" without one.
    """

    address: str
    socket: str
    rack: str
    folder: str


class RegionKeeper(SealedActor[RegionOrder]):
    """A detached actor, one per node that has workers."""

    order_type = RegionOrder

    def __init__(self, order: RegionOrder | None = None) -> None:
        super().__init__(order)
        self._ports = ReservedPorts()
        self._region: Region | None = None
        self._holder: RegionHolder | None = None
        self._secret = ""
        self._ended = threading.Event()

    def start(self) -> tuple[str, str, str, str]:
        """Returns a KeptRegion as a tuple.

        Raises:
            ValueError: the node has too little memory, or its folder of pages or the address cannot be used.
            OSError: the socket cannot be made.
        """
        order = self._wait_order()
        folder = self._open_folder(order) if order.disk is not None else ""
        socket = Path(order.socket) if order.socket else region_path(default_directory(), ProcessId.of(os.getpid()))
        socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(socket.parent)
        remove_stale_regions(socket.parent)
        address = self._reserve(order.address)
        self._region = Region.create(order.num_bytes, available_memory_bytes())
        self._holder = RegionHolder(socket, order.cluster_token, self._region)
        return KeptRegion(address, str(socket), own_rack(), folder)

    def namespace_secret(self, public_key: bytes) -> bytes:
        """Returns the secret of the folder of pages, sealed to the key; b"" without one."""
        return seal(self._secret.encode(), public_key) if self._secret else b""

    def num_untouched_bytes(self) -> int:
        """Memory of the node that the region will still take."""
        return self._region.num_untouched_bytes if self._region is not None else 0

    def wait_ended(self) -> None:
        """Returns when the keeper has ended. The caller gets an error if the process dies."""
        self._ended.wait()

    def stop(self) -> None:
        """Gives up the region and the port."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        self._ports.close()
        self._ended.set()

    def _open_folder(self, order: RegionOrder) -> str:
        assert order.disk is not None
        directory, name = Path(order.disk.directory), ""
        if order.socket:
            # A store of this cluster may still hold the folder.
            own = namespace_secret(directory)
        else:
            own = open_disk(order.disk)
            folder = Folder(directory)
            name = folder.name
            folder.close()
        if order.namespace_secret and order.namespace_secret != own:
            adopt_secret(directory, order.namespace_secret)
        self._secret = order.namespace_secret or own
        return name

    def _reserve(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not int(port):
            return self._ports.reserve(host, 0, "interface")
        # A running store may listen there. The start of the next one reports any other process.
        with contextlib.suppress(ValueError):
            self._ports.reserve(host, int(port), "interface")
        return address

"""The process of a node's page store: region, server, disk, reports, metrics. Light: no torch."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from tandem import exit_codes
from tandem.exit_watch import ExitWatch
from tandem.hosts import host_id
from tandem.key_file import watched_keys
from tandem.messages import PROTOCOL_VERSION, PageFormat, Peer, StoreBeat, StoreJoin
from tandem.open_files import raise_open_files_limit
from tandem.page_changes import PageChanges
from tandem.pagestore.config import StoreConfig
from tandem.pagestore.messages import DISK, PEER
from tandem.pagestore.region import Region
from tandem.pagestore.region_client import TakenRegion, take_region
from tandem.pagestore.server.base import SlowTier
from tandem.pagestore.server.disk.disk_tier import DiskStats, DiskTier
from tandem.pagestore.server.disk.folder import FolderInUse
from tandem.pagestore.server.disk.opened_folder import purge_folder
from tandem.pagestore.server.metrics import store_registry
from tandem.pagestore.server.page_store import PageStore
from tandem.pagestore.server.peers.peer_tier import PeerTier
from tandem.pagestore.server.peers.service import PeerPages
from tandem.pagestore.server.router_feed import RouterFeed
from tandem.pagestore.server.server import StoreAdmin, StoreServer
from tandem.processes import ProcessId
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.loop_thread import LoopThread
from tandem.rpc.metrics_server import MetricsServer
from tandem.watched_files import watch

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
# A killed store is gone and its copies have settled by then, in seconds.
EARLIER_STORES_S = 1.0
LOOK_INTERVAL_S = 0.05
STOP_TIMEOUT_S = 5.0
STOP_GRACE_S = 0.5
PROBE_TIMEOUT_S = 5.0
# Largest interval between polls, in seconds: exits of workers may wait that long. Ended transfers of the disk do not.
POLL_INTERVAL_S = 0.02


class StoreProcess:
    """Called from one thread outside the store's loop."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._credentials = ClusterCredentials(config.cluster_token, config.cluster_tls)
        self._loop_thread = LoopThread()
        self._region: Region | None = None
        self._slots = memoryview(b"")
        self._former_users: dict[int, ExitWatch] = {}
        self._earlier_stores: Sequence[ProcessId] = ()
        self._sessions = StoreServer(self._make_store, _end_process, self._purge_unopened)
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None
        self._disk: DiskTier | None = None
        # Purges of an unopened folder wait for the disk, one at a time: they must not take all threads of the loop.
        self._folder_thread = ThreadPoolExecutor(1, "folder")
        # Whether the folder has pages that a purge did not reach.
        self._has_purged_pages = False
        self._peers: PeerTier | None = None
        self._named_peers: Sequence[Peer] = ()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> str:
        """Gets the region and opens the port. Returns its address.

        Raises:
            ValueError: the port is taken.
            OSError: the holder of the region does not answer.
        """
        raise_open_files_limit()
        taken = self._take_region()
        deadline = time.monotonic() + EARLIER_STORES_S
        while taken.stores and time.monotonic() < deadline:
            taken.region.close()
            time.sleep(LOOK_INTERVAL_S)
            taken = self._take_region()
        self._region, self._sessions.region_id = taken.region, taken.region_id
        self._slots = memoryview(taken.region.map())
        self._former_users = {user.pid: ExitWatch(user) for user in taken.users}
        self._earlier_stores = taken.stores
        self._loop_thread.start()
        return self._loop_thread.call(self._serve(), START_TIMEOUT_S)

    @property
    def metrics_address(self) -> str:
        """Address of the metrics over HTTP; empty if the cluster uses TLS internally."""
        return self._metrics.address if self._metrics is not None else ""

    def probe(self) -> None:
        """Raises TimeoutError if the loop does not answer within PROBE_TIMEOUT_S."""
        self._loop_thread.call(asyncio.sleep(0), PROBE_TIMEOUT_S)

    def stop(self) -> None:
        if self._loop_thread.loop is not None:
            self._loop_thread.call(self._close(), STOP_TIMEOUT_S)
            self._loop_thread.stop()
        self._folder_thread.shutdown(wait=False, cancel_futures=True)
        if self._disk is not None:
            self._disk.close()
        if self._metrics is not None:
            self._metrics.close()

    def _take_region(self) -> TakenRegion:
        return take_region(Path(self._config.region_socket), self._config.cluster_token, as_store=True)

    async def _wait_for_earlier_stores(self) -> None:
        """Workers may begin with an earlier store as long as it lives: the users of its end are the former users."""
        logger.warning("waiting for the end of earlier stores of this node: %s", self._earlier_stores)
        try:
            while (taken := await asyncio.to_thread(self._take_region)).stores:
                taken.region.close()
                await asyncio.sleep(LOOK_INTERVAL_S)
            taken.region.close()
            if taken.region_id != self._sessions.region_id:
                raise OSError("the memory has another owner now")
        except Exception:
            logger.exception("the page store failed")
            _end_process()
        self._former_users = {user.pid: ExitWatch(user) for user in taken.users}
        self._sessions.refusal = ""

    def _make_store(self, page_format: PageFormat) -> PageStore:
        assert self._region is not None
        num_slots = self._region.num_bytes // page_format.page_bytes
        if not num_slots:
            raise ValueError(f"the region of {self._region.num_bytes} bytes holds no page of {page_format.page_bytes}")
        if (disk := self._config.disk) is not None:
            self._disk = DiskTier(
                Path(disk.directory),
                disk.num_bytes,
                page_format,
                self._region.map(),
                page_format.page_bytes,
                on_ended=self._poll_soon,
                # The supervising process has made it. Without its mount, pages would fill the disk below.
                make_folder=False,
                namespace_secret=self._config.namespace_secret,
            )
            if self._has_purged_pages:
                self._disk.purge()
        logger.info("%d slots of %d bytes", num_slots, page_format.page_bytes)
        former = {pid: watch.is_gone for pid, watch in self._former_users.items()}
        self._peers = PeerTier(self._slots, page_format, self._credentials, time.monotonic, self._sessions.poll_soon)
        self._peers.set_peers(self._named_peers)
        tiers: list[tuple[int, SlowTier]] = [(DISK, self._disk)] if self._disk is not None else []
        store = PageStore(
            num_slots, time.monotonic, [*tiers, (PEER, self._peers)], former, self._config.namespace_share
        )
        return store

    def _hear_purges(self, names: Sequence[bytes]) -> bool:
        return self._peers is not None and self._peers.hear_purges(names)

    def _poll_soon(self) -> None:
        """Called by threads of the disk."""
        loop = self._loop_thread.loop
        # Closed, if the process ends.
        with contextlib.suppress(RuntimeError):
            if loop is not None:
                loop.call_soon_threadsafe(self._sessions.poll_soon)

    async def _purge_unopened(self) -> None:
        """Purges the folder of pages before the first session opens it."""
        if self._config.disk is None:
            return
        directory = Path(self._config.disk.directory)
        self._has_purged_pages = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._folder_thread, purge_folder, directory)
            self._has_purged_pages = False
        except FolderInUse:
            if self._disk is None:
                logger.exception("disk tier %s: a purge is not recorded, so pages stay: remove the folder", directory)
        except (ValueError, OSError) as error:
            logger.error("disk tier %s: a purge is not recorded, so pages stay: %s", directory, error)

    def _take_changes(self) -> Mapping[int, PageChanges]:
        return self._sessions.store.take_changes() if self._sessions.store is not None else {}

    def _set_peers(self, peers: Sequence[Peer]) -> None:
        self._named_peers = peers
        if self._peers is not None:
            self._peers.set_peers(peers)

    async def _report(self) -> None:
        config = self._config
        join = StoreJoin(
            PROTOCOL_VERSION,
            config.store_id,
            secrets.token_hex(16),
            host_id(),
            config.rack,
            f"{config.host}:{config.port}",
            os.getpid(),
            self.metrics_address,
        )
        try:
            await RouterFeed(
                config.routers,
                join,
                self._credentials,
                self._take_changes,
                self._beat,
                self._set_peers,
                self._sessions.purge,
            ).run()
        except Exception:
            logger.exception("the page store failed")
            _end_process()

    def _beat(self) -> StoreBeat:
        stats, disk = self._sessions.latest_stats, self._disk_stats()
        return StoreBeat(
            num_slots=stats.num_slots if stats is not None else 0,
            num_host_pages=stats.num_ready if stats is not None else 0,
            num_disk_pages=disk.num_pages if disk is not None else 0,
            num_disk_bytes=disk.num_bytes if disk is not None else 0,
            is_disk_off=disk is not None and disk.is_off,
        )

    def _disk_stats(self) -> DiskStats | None:
        return self._disk.stats() if self._disk is not None else None

    async def _serve(self) -> str:
        config = self._config
        server = self._server = new_server([cluster_auth(config.cluster_token)], host=config.host, reuse_ports=True)
        address = bind(server, config.host, config.port, self._credentials.for_server())
        registry = store_registry(
            config.store_id, lambda: self._sessions.latest_stats, self._disk_stats, config.num_restarts
        )
        if not self._credentials.secure:
            # With TLS, readers have no certificate of the cluster.
            self._metrics = MetricsServer(registry, config.host, config.api_keys)
            if config.key_file is not None:
                keys = watched_keys(config.key_file, self._metrics.set_api_keys)
                # This store may have started again since the file was replaced.
                await asyncio.to_thread(keys.poll)
                self._tasks.append(asyncio.create_task(watch([keys])))
        if self._earlier_stores:
            self._sessions.refusal = "an earlier page store of this node has not ended yet"
            self._tasks.append(asyncio.create_task(self._wait_for_earlier_stores()))
        self._sessions.add_to(server)
        PeerPages(self._sessions, self._slots, self._hear_purges).add_to(server)
        StoreAdmin(self._sessions, registry).add_to(server)
        await server.start()
        self._tasks.append(asyncio.create_task(self._sessions.run(POLL_INTERVAL_S)))
        self._tasks.append(asyncio.create_task(self._report()))
        return address

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sessions.stop()
        if self._peers is not None:
            await self._peers.stop()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)


def _end_process() -> None:
    logging.shutdown()
    os._exit(exit_codes.STORE_FAILED)

"""The process of a worker: engine thread, asyncio thread, server and streams to the routers."""

import asyncio
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import grpc

from tandem import exit_codes
from tandem.engine.base import EngineBase
from tandem.engine.expert_balance import ExpertBalance
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.hosts import host_id
from tandem.messages import PROTOCOL_VERSION, Heartbeat, Hello, PageFormat
from tandem.open_files import raise_open_files_limit
from tandem.recording import Recorder
from tandem.rpc.auth import cluster_auth
from tandem.rpc.calls import is_cancelled
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.loop_thread import LoopThread
from tandem.rpc.recording_service import RecordingService
from tandem.worker.adapter_exchange import AdapterExchange, takes_none
from tandem.worker.admin import WorkerAdmin
from tandem.worker.base import LinkConnections, Outbox, Scheduler, StoreConnection, WorkerRole
from tandem.worker.config import WorkerConfig
from tandem.worker.control_client import RefusedError
from tandem.worker.engine_thread import SWITCH_INTERVAL_S, EngineThread, Outgoing
from tandem.worker.events import AdapterLoaded, StartRecording, StopRecording
from tandem.worker.metrics import worker_registry
from tandem.worker.metrics_port import MetricsPort
from tandem.worker.ranks.leader import Leader
from tandem.worker.records import RecordKeeper
from tandem.worker.router_streams import RouterStreams
from tandem.worker.step_watch import end_when_stalled

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 30.0


class WorkerProcess:
    """One worker, from loading its model to its stop. Methods are called from one other thread."""

    def __init__(
        self,
        config: WorkerConfig,
        role: WorkerRole,
        on_progress: Callable[[str], None],
        store: StoreConnection | None = None,
    ) -> None:
        """Args: store: None: the cluster has no page store."""
        self._config = config
        self._store = store
        self._role = role
        self._on_progress = on_progress
        self._credentials = ClusterCredentials(config.cluster_token, config.cluster_tls)
        self._began = time.monotonic()
        self._incarnation = uuid.uuid4().hex
        self._engine: EngineBase | None = None
        self._leader = Leader(config, role, self._incarnation, store)
        self._recorder = Recorder()
        self._experts: ExpertBalance | None = None
        self._engine_thread = EngineThread(
            self._build, self._deliver, self._on_engine_crash, self._recorder, self._poll_experts
        )
        self._loop_thread = LoopThread()
        self._server: grpc.aio.Server | None = None
        self._metrics = MetricsPort(self._credentials.secure)
        self._links: LinkConnections | None = None
        self._routers: RouterStreams | None = None
        self._control_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._hello: Hello | None = None
        # Set by the first Welcome, or by a refusal before any Welcome.
        self._connected = threading.Event()
        self._refusal = ""
        self._stopped = threading.Event()

    def start(self) -> str:
        """Loads the model, allocates the pool and opens the ports. Returns the address for links.

        Raises:
            ValueError: the model cannot be served as configured.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        # A worker has several connections to each other worker.
        raise_open_files_limit()
        self._loop_thread.start()
        self._engine_thread.start()
        self._engine_thread.wait_built(LOAD_TIMEOUT_S)
        address = self._loop_thread.call(self._serve(), CALL_TIMEOUT_S)
        self._on_progress("loaded")
        return address

    def connect(self, router_addresses: Sequence[str]) -> None:
        """Joins the cluster. Returns after the first Welcome.

        Args:
            router_addresses: addresses of all routers, running or not.

        Raises:
            ValueError: a router refused this worker.
            TimeoutError: no Welcome within connect_timeout_s.
        """
        self._loop_thread.call(self._connect(router_addresses), CALL_TIMEOUT_S)
        if not self._connected.wait(self._config.connect_timeout_s):
            raise TimeoutError(
                f"no router at {', '.join(router_addresses)} answered within {self._config.connect_timeout_s:g} s"
            )
        if self._refusal:
            raise ValueError(self._refusal)
        self._on_progress("ready")

    def set_routers(self, addresses: Sequence[str]) -> None:
        """Joins new routers, and leaves those that are no longer named. Does nothing before `connect`."""
        if self._loop_thread.loop is not None:
            self._loop_thread.call(self._set_routers(addresses), CALL_TIMEOUT_S)

    def stop(self) -> None:
        """Leaves the cluster and ends both threads. The router restarts the worker's requests elsewhere."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._loop_thread.loop is not None:
            self._loop_thread.call(self._close(), CALL_TIMEOUT_S)
        self._metrics.close()
        self._engine_thread.stop(STOP_TIMEOUT_S)
        if self._store is not None:
            self._store.close()
        if self._engine is not None:
            self._engine.close()
        self._leader.stop(STOP_TIMEOUT_S)
        self._loop_thread.stop()

    # --- Engine thread ---

    def _build(self, outbox: Outbox) -> Scheduler:
        config = self._config
        engine = self._engine = self._leader.build(self._on_progress, lambda: self._engine_thread.num_steps)
        if engine.adapters is not None:
            engine.adapters.on_loaded = lambda: self._engine_thread.post(AdapterLoaded())
        if engine.expert_counts is not None:
            self._experts = ExpertBalance(engine.expert_counts)
        num_pages, page_size = engine.pool.num_pages, engine.pool.layout.page_size
        cache = CacheManager(num_pages, page_size, config.engine.eviction, self._max_request_pages())
        if self._store is None:
            return self._role.build_scheduler(engine, cache, outbox, config, self._recorder)
        self._on_progress("mapping the page store's region")
        tier = self._store.build_tier(
            engine, cache, outbox, lambda: self._engine_thread.latest_stats, self._leader.copy_pipes
        )
        return self._store.tiered(self._role.build_scheduler(engine, cache, outbox, config, self._recorder, tier))

    def _max_request_pages(self) -> int:
        assert self._engine is not None
        pool = self._engine.pool
        return self._role.max_request_pages(pool.num_pages, pool.layout.page_size, self._config.max_model_len)

    def _deliver(self, outgoing: Outgoing) -> None:
        assert self._loop_thread.loop is not None
        if not self._stopped.is_set():
            self._loop_thread.loop.call_soon_threadsafe(self._send, outgoing)

    def _poll_experts(self) -> None:
        if self._experts is not None:
            self._experts.poll()

    def _on_engine_crash(self, error: BaseException) -> None:
        # Pages and tensors are in an unknown state: exit at once.
        logging.shutdown()
        os._exit(exit_codes.ENGINE_FAILED)

    # --- Any thread ---

    def mapped_workers(self) -> list[str]:
        """Returns the workers whose memory is mapped here, dead ones included."""
        return self._links.mapped_workers() if self._links is not None else []

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._num_steps(), self._engine_thread.latest_stats)

    def _num_steps(self) -> int:
        return self._leader.num_steps(self._engine_thread.num_steps)

    # --- Asyncio thread ---

    async def _serve(self) -> str:
        assert self._engine is not None
        config, engine = self._config, self._engine
        server = self._server = new_server([cluster_auth(config.cluster_token)], host=config.host)
        address = bind(server, config.host, 0, self._credentials.for_server())
        store = self._store
        registry = worker_registry(
            config.role,
            config.worker_id,
            self._heartbeat,
            config.num_restarts,
            self._experts,
            (lambda: store.is_up) if store is not None else None,
            self._leader.num_ranks,
        )
        await self._metrics.open(registry, config)
        layout = engine.pool.layout.whole
        hello = self._hello = Hello(
            PROTOCOL_VERSION,
            config.worker_id,
            self._incarnation,
            config.role,
            config.engine.device,
            address,
            os.getpid(),
            PageFormat(engine.model_fingerprint, layout.page_bytes, layout.tag),
            engine.pool.num_pages,
            layout.page_size,
            self._metrics.address,
            config.num_restarts,
            self._role.has_links,
            self._max_request_pages(),
            host_id(),
            config.rack,
            self._role.max_batch_size,
            time.monotonic() - self._began,
            self._leader.follower_pids,
        )
        self._links = self._role.build_links(
            engine, hello, config, self._credentials, self._engine_thread.post, self._leader.followers
        )
        self._links.add_to(server)
        WorkerAdmin(self._engine_thread.post, registry).add_to(server)
        post = self._engine_thread.post
        RecordingService(
            config.worker_id, config.role, lambda: post(StartRecording()), lambda reply: post(StopRecording(reply))
        ).add_to(server)
        await server.start()
        if self._store is not None:
            self._store.start(hello, self._credentials, post)
        return address

    async def _set_routers(self, addresses: Sequence[str]) -> None:
        if self._routers is not None:
            self._routers.set_addresses(addresses)

    async def _connect(self, router_addresses: Sequence[str]) -> None:
        assert self._hello is not None and self._links is not None
        self._routers = RouterStreams(
            router_addresses,
            self._hello,
            credentials=self._credentials,
            heartbeat=lambda: None if self._leader.is_silent() else self._heartbeat(),
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            records=RecordKeeper(self._config.max_record_bytes),
            connect_timeout_s=self._config.connect_timeout_s,
            post=self._engine_thread.post,
            set_peers=self._links.set_peers,
            on_connected=self._connected.set,
            adapters=self._adapter_exchange(),
        )
        self._control_task = asyncio.create_task(self._run_control(self._routers))
        self._watch_task = asyncio.create_task(
            end_when_stalled(self._num_steps, self._config.stall_timeout_s, self._config.heartbeat_interval_s)
        )

    def _adapter_exchange(self) -> AdapterExchange:
        engine = self._config.engine
        if not engine.max_loras:
            return AdapterExchange(self._engine_thread.post, takes_none)
        from tandem.worker.adapter_check import AdapterCheck

        return AdapterExchange(self._engine_thread.post, AdapterCheck(engine, self._config.lora_root))

    async def _run_control(self, routers: RouterStreams) -> None:
        try:
            await routers.run()
        except ConnectionError as error:
            if isinstance(error, RefusedError) and not self._connected.is_set():
                self._refusal = str(error)
                self._connected.set()
                return
            logger.error("giving up: %s", error)
            logging.shutdown()
            os._exit(exit_codes.NO_ROUTER)
        except (Exception, asyncio.CancelledError):
            if is_cancelled():
                raise
            # Without this task the worker looks alive and receives nothing: exit.
            logger.exception("the control streams failed")
            logging.shutdown()
            os._exit(exit_codes.CONTROL_FAILED)

    def _send(self, outgoing: Outgoing) -> None:
        assert self._links is not None
        # Links first: then both workers may learn of a request together.
        for epoch, messages in outgoing.to_links.items():
            self._links.send(epoch, messages)
        for epoch, reason in outgoing.closed_links.items():
            self._links.close_link(epoch, reason)
        if self._store is not None:
            for epoch, to_store in outgoing.to_store.items():
                self._store.send(epoch, to_store)
        if outgoing.to_router and self._routers is not None:
            self._routers.send(outgoing.to_router)
        if outgoing.cache_changes is not None:
            assert self._routers is not None, "nothing is cached before a router has sent anything"
            self._routers.tell_changes(outgoing.cache_changes)

    async def _close(self) -> None:
        tasks = [task for task in (self._control_task, self._watch_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._metrics.stop_watching()
        if self._links is not None:
            await self._links.stop()
        if self._store is not None:
            await self._store.stop()
        if self._server is not None:
            await self._server.stop(grace=0.5)

"""One router's process."""

import asyncio
import contextlib
import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from tandem import exit_codes
from tandem.config import ROLES
from tandem.key_file import KeyFile, watched_keys
from tandem.open_files import raise_open_files_limit
from tandem.router.config import AUTO, RouterAddresses, RouterConfig
from tandem.router.control_server import ControlServer
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.client_servers import SERVICE, STOP_GRACE_S, ClientServers
from tandem.router.frontends.health import HealthService
from tandem.router.frontends.kept_responses import KeptResponses
from tandem.router.frontends.openai.app import make_app
from tandem.router.frontends.response_exchange import ResponseExchange
from tandem.router.frontends.watch_places import WatchPlaces
from tandem.router.observe.live.feed import LiveFeed
from tandem.router.observe.live.snapshot import SnapshotBuilder
from tandem.router.observe.recordings import ROUTER, Recordings
from tandem.router.observe.request_spans import RequestSpans
from tandem.router.peer_exchange import PeerExchange
from tandem.router.policies.base import RoutingPolicy
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.router import Router
from tandem.router.store_reports import StoreReports
from tandem.router.text.embedding_dimensions import read_embedding_dimensions
from tandem.router.text.generation_config import FILE, SamplingDefaults, read_sampling_defaults
from tandem.router.text.tokenizer import Tokenizer
from tandem.router.workers.leans import Lean, RouterDemand
from tandem.router.workers.sizes import ClusterSize
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.rpc.grpc_loop import GrpcLoop
from tandem.rpc.loop_thread import LoopThread
from tandem.rpc.recording_service import REQUESTS_PER_PART, RecordingService
from tandem.rpc.tls import ClientPortTls
from tandem.v1 import router_pb2_grpc, store_pb2_grpc, worker_pb2_grpc
from tandem.watched_files import WatchedFiles, poll_all, watch

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 5.0
# Limit on the wait for workers before a router opens the shared ports.
SHARED_PORTS_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 0.02
# Open files besides the connections of clients and of planned workers: further workers, routers, refused clients, logs,
# libraries.
NUM_OTHER_FILES = 512
# The interpreter's thread switch interval, in seconds. With the default of 5 ms the loop waits as long for each thread
# that reads a large request.
SWITCH_INTERVAL_S = 0.001


class RouterProcess:
    """Called from one thread outside the router's loop."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._loop_thread = LoopThread(GrpcLoop)
        self._router: Router | None = None
        self._workers_server: grpc.aio.Server | None = None
        self._frontend: Frontend | None = None
        self._feed: LiveFeed | None = None
        self._spans: RequestSpans | None = None
        self._open_ports: Callable[[int, int], ClientServers] | None = None
        self._responses: ResponseExchange | None = None
        self._client_servers: list[ClientServers] = []
        self._must_look = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> RouterAddresses:
        """
        Raises:
            ValueError: a port is taken; or the tokenizer, chat template, a TLS file, the routing policy or the tool
                parser is unusable.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._loop_thread.start()
        return self._loop_thread.call(self._serve(), START_TIMEOUT_S)

    def open_shared_ports(self) -> None:
        """Opens the shared ports once this router can serve, or after SHARED_PORTS_TIMEOUT_S. Raises ValueError if a
        port is taken."""
        self._loop_thread.call(self._open_shared_ports(), SHARED_PORTS_TIMEOUT_S + START_TIMEOUT_S)

    def probe(self) -> None:
        """Raises TimeoutError if the loop does not answer within PROBE_TIMEOUT_S."""
        self._loop_thread.call(asyncio.sleep(0), PROBE_TIMEOUT_S)

    def take_request_lines(self, num_bytes: float = math.inf) -> list[str]:
        kept = self._router.kept_lines if self._router is not None else None
        return kept.take(num_bytes) if kept is not None else []

    def set_workers(self, planned: Mapping[str, str]) -> dict[str, int]:
        return self._loop_thread.call(self._set_workers(planned), PROBE_TIMEOUT_S)

    def exchange_leans(self, leans: Mapping[str, Lean], size: ClusterSize | None) -> RouterDemand:
        return self._loop_thread.call(self._exchange_leans(leans, size), PROBE_TIMEOUT_S)

    def look_at_files(self) -> None:
        """Looks at the files of certificates and keys without waiting for WATCH_INTERVAL_S. Returns at once."""
        if (loop := self._loop_thread.loop) is not None:
            loop.call_soon_threadsafe(self._must_look.set)

    def drain(self, timeout_s: float) -> int:
        """Returns the number of requests unfinished after `timeout_s`."""
        return self._loop_thread.call(self._drain(timeout_s), timeout_s + STOP_TIMEOUT_S)

    def leave(self) -> int:
        """Closes the client ports to new requests; calls and connections with requests stay. Returns the number of
        requests in hand. Clients that are refused go to another router."""
        return self._loop_thread.call(self._leave(), STOP_TIMEOUT_S)

    def stop(self) -> None:
        if self._loop_thread.loop is not None:
            self._loop_thread.call(self._close(), STOP_TIMEOUT_S)
            self._loop_thread.stop()

    async def _serve(self) -> RouterAddresses:
        config = self._config = _within_open_files(self._config, raise_open_files_limit())
        tokenizer = Tokenizer(Path(config.model_dir), Path(config.chat_template) if config.chat_template else None)
        router = self._router = Router(config, make_policy(config.routing))
        if config.otlp_endpoint:
            self._spans = _open_spans(config, router)
        defaults = SamplingDefaults()
        if config.generation_config == AUTO:
            defaults = read_sampling_defaults(Path(config.model_dir))
            if described := str(defaults):
                logger.info("defaults of OpenAI's API, from the model's %s: %s", FILE, described)
        dimensions = read_embedding_dimensions(Path(config.model_dir))
        frontend = self._frontend = Frontend(router, tokenizer, config, defaults, dimensions)
        frontend.output_format.find()
        credentials = ClusterCredentials(config.cluster_token, config.cluster_tls)
        peers = {name: other.cluster for name, other in config.routers.items() if name != config.router_id}
        exchange = PeerExchange(
            config.router_id,
            peers,
            router.elsewhere,
            frontend.counts,
            router.update_loads,
            credentials,
            router.adapters,
        )
        router.adapter_loading.share = exchange.share_adapters
        health_service = HealthService(_serving(router), WatchPlaces(frontend.access.has_key))
        kept = KeptResponses(time.monotonic)
        responses = self._responses = ResponseExchange(
            config.router_id, peers, kept, credentials, config.max_body_bytes
        )
        frames = SnapshotBuilder(router, config)
        feed = self._feed = LiveFeed(frames, len(config.api_keys))
        app = make_app(frontend, responses, feed, credentials)
        workers = new_server(
            [cluster_auth(config.cluster_token)], reuse_ports=config.reuse_ports, host=config.cluster_host
        )
        cluster_address = bind(workers, config.cluster_host, config.cluster_port, credentials.for_server())
        recordings = Recordings(
            {**peers, config.router_id: cluster_address}, lambda: router.workers, router.clocks, credentials
        )
        tls = ClientPortTls(config.tls) if config.tls else None
        watched = [tls.files] if tls else []
        if config.key_file is not None:
            watched.append(self._watched_keys(config.key_file, frontend, feed, frames))
        # Before any port opens: this router may have started again since a file was replaced.
        await asyncio.to_thread(poll_all, watched)
        self._open_ports = functools.partial(ClientServers, frontend, app, health_service, recordings, config, tls)
        worker_pb2_grpc.add_ClusterServicer_to_server(ControlServer(router), workers)
        store_pb2_grpc.add_StoreReportsServicer_to_server(StoreReports(router), workers)
        router_pb2_grpc.add_RouterPeerServicer_to_server(exchange, workers)
        router_pb2_grpc.add_RouterResponsesServicer_to_server(responses, workers)
        RecordingService(
            config.router_id,
            ROUTER,
            router.recorder.start,
            lambda reply: reply(router.stop_recording()),
            REQUESTS_PER_PART,
        ).add_to(workers)
        own = self._open_ports(config.grpc_port, config.http_port)
        addresses = RouterAddresses(own.grpc_address, own.http_address, cluster_address)
        await workers.start()
        self._workers_server = workers
        self._client_servers.append(own)
        await own.start()
        self._tasks = [
            asyncio.create_task(_vital(router.watch())),
            asyncio.create_task(_vital(exchange.run())),
            asyncio.create_task(_vital(feed.run())),
            asyncio.create_task(_vital(_report_health(router, health_service))),
            asyncio.create_task(_vital(watch(watched, self._must_look))),
        ]
        return addresses

    def _watched_keys(
        self, key_file: KeyFile, frontend: Frontend, feed: LiveFeed, frames: SnapshotBuilder
    ) -> WatchedFiles:
        loop = asyncio.get_running_loop()

        def set_keys(keys: Sequence[str]) -> None:
            frontend.set_keys(keys)
            feed.num_keys = frames.num_keys = len(keys)

        return watched_keys(key_file, lambda keys: loop.call_soon_threadsafe(set_keys, keys))

    async def _open_shared_ports(self) -> None:
        config = self._config
        if not config.shared_grpc_port or len(self._client_servers) > 1:
            return
        assert self._router is not None and self._open_ports is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHARED_PORTS_TIMEOUT_S):
                while self._router.not_ready_reason():  # noqa: ASYNC110
                    await asyncio.sleep(HEALTH_INTERVAL_S)
        shared = self._open_ports(config.shared_grpc_port, config.shared_http_port)
        self._client_servers.append(shared)
        await shared.start()

    async def _set_workers(self, planned: Mapping[str, str]) -> dict[str, int]:
        assert self._router is not None
        return self._router.set_workers(planned)

    async def _exchange_leans(self, leans: Mapping[str, Lean], size: ClusterSize | None) -> RouterDemand:
        assert self._router is not None
        return self._router.exchange_leans(leans, size)

    async def _leave(self) -> int:
        assert self._router is not None
        for servers in self._client_servers:
            servers.leave()
        return self._router.num_requests

    async def _drain(self, timeout_s: float) -> int:
        assert self._router is not None
        self._router.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._router.idle.wait()
        return self._router.num_requests

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._router is not None:
            self._router.shut_down()
        if self._feed is not None:
            self._feed.close()
        if self._responses is not None:
            await self._responses.background.close()
        # Clients first: otherwise their requests end with a lost worker.
        for servers in self._client_servers:
            await servers.stop()
        if self._workers_server is not None:
            await self._workers_server.stop(STOP_GRACE_S)
        if self._frontend is not None:
            self._frontend.close()
        if self._router is not None and self._router.request_lines is not None:
            self._router.request_lines.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)


def _within_open_files(config: RouterConfig, num_files: int) -> RouterConfig:
    """Lowers max_connections so that clients leave the others' files. Raises ValueError if none are left for them."""
    num_ports = 4 if config.shared_grpc_port else 2
    num_other_files = NUM_OTHER_FILES + len(config.workers)
    max_connections = (num_files - num_other_files) // num_ports
    if max_connections >= config.max_connections:
        return config
    if max_connections < 1:
        raise ValueError(
            f"the system allows {num_files} open files, and a router needs more than {num_other_files + num_ports}: "
            "raise the limit (ulimit -Hn)"
        )
    logger.warning(
        "the system allows %d open files: each port takes %d connections instead of the %d of --max-connections; raise "
        "the limit (ulimit -Hn), or lower the number",
        num_files,
        max_connections,
        config.max_connections,
    )
    return replace(config, max_connections=max_connections)


def make_policy(name: str) -> RoutingPolicy:
    """Raises ValueError if the policy is unknown or cannot be instantiated."""
    policy = ROUTING_POLICIES.load(name)
    try:
        return policy()
    except Exception as error:  # A user's class may raise anything.
        raise ValueError(f"the routing policy {name} cannot be made: {error}") from error


def _open_spans(config: RouterConfig, router: Router) -> RequestSpans | None:
    try:
        # The import takes a third of a second, and needs an extra.
        from tandem.router.observe.otlp import OtlpExporter

        exporter = OtlpExporter(config.otlp_endpoint, config.model_name, config.router_id)
    except ValueError as error:
        # Environment variables for all programs of a host must not keep a router from starting.
        logger.error("no spans of requests are sent: %s", error)
        return None
    spans = RequestSpans(exporter.export, router.metrics.spans_dropped)
    router.observers.subscribe(spans.put)
    return spans


def _serving(router: Router) -> dict[str, bool]:
    """Returns the states for gRPC's health service: "" and the inference service are up if a request can be served, a
    role's service if one of its workers is connected."""
    ready = not router.not_ready_reason()
    roles = {worker.role for worker in router.workers}
    return {"": ready, SERVICE: ready} | {f"tandem.{role}": role in roles for role in ROLES}


async def _vital(task: Coroutine[Any, Any, None]) -> None:
    """Runs an indispensable task: its failure ends the process."""
    try:
        await task
    except Exception:
        logger.exception("a vital task failed")
        logging.shutdown()
        os._exit(exit_codes.ROUTER_TASK_FAILED)


async def _report_health(router: Router, service: HealthService) -> None:
    known: dict[str, bool] = {}
    while True:
        if (serving := _serving(router)) != known:
            known = serving
            service.publish(serving)
        await asyncio.sleep(HEALTH_INTERVAL_S)

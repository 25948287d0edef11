"""The router's process: its loop's thread, the clients' two servers and the workers'."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.config import RouterConfig
from router.control_server import ControlServer
from router.frontends.base import Frontend
from router.frontends.encoded_request import check_encoded
from router.frontends.grpc import InferenceService, api_key_auth
from router.frontends.malformed import MalformedRequestInterceptor
from router.frontends.openai.app import make_app
from router.frontends.openai.server import HttpServer
from router.policies.base import RoutingPolicy
from router.policies.table import ROUTING_POLICIES
from router.router import Router
from router.text.tokenizer import Tokenizer
from tandem import exit_codes
from tandem.config import ROLES
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.loop_thread import LoopThread
from tandem.rpc.tls import server_credentials
from tandem.v1 import inference_pb2, inference_pb2_grpc, worker_pb2_grpc

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
HEALTH_INTERVAL_S = 0.02


class RouterAddresses(NamedTuple):
    grpc: str
    http: str
    cluster: str


class RouterProcess:
    """One router, from its start to its stop; called from one thread that is not its loop's."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._loop_thread = LoopThread()
        self._router: Router | None = None
        self._frontend: Frontend | None = None
        self._servers: list[grpc.aio.Server] = []
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> RouterAddresses:
        """Opens its ports.

        Raises:
            ValueError: a port is taken, the model directory has no usable tokenizer, the routing policy cannot be made,
                or a TLS file is unusable.
        """
        self._loop_thread.start()
        return self._loop_thread.call(self._serve(), START_TIMEOUT_S)

    def drain(self, timeout_s: float) -> int:
        """Takes no new requests from now on and waits for those in hand; returns how many are left."""
        return self._loop_thread.call(self._drain(timeout_s), timeout_s + STOP_TIMEOUT_S)

    def stop(self) -> None:
        if self._loop_thread.loop is not None:
            self._loop_thread.call(self._close(), STOP_TIMEOUT_S)
            self._loop_thread.stop()

    async def _serve(self) -> RouterAddresses:
        config = self._config
        tokenizer = Tokenizer(Path(config.model_dir))
        router = self._router = Router(config, make_policy(config.routing))
        frontend = self._frontend = Frontend(router, tokenizer, config)
        check = partial(check_encoded, max_model_len=config.max_model_len)
        clients = new_server(
            [api_key_auth(frontend), MalformedRequestInterceptor(SERVICE, check)], config.max_body_bytes
        )
        workers = new_server([cluster_auth(config.cluster_token)])
        health_service = health.aio.HealthServicer()
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(frontend), clients)
        health_pb2_grpc.add_HealthServicer_to_server(health_service, clients)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), clients)
        worker_pb2_grpc.add_ClusterServicer_to_server(ControlServer(router), workers)
        credentials = server_credentials(config.tls) if config.tls else None
        self._http = HttpServer(make_app(frontend), config.host, config.http_port, config.tls)
        addresses = RouterAddresses(
            bind(clients, config.host, config.grpc_port, credentials),
            self._http.address,
            bind(workers, config.cluster_host, config.cluster_port),
        )
        await _set_health(health_service, _serving(router))
        for server in (workers, clients):
            await server.start()
            self._servers.append(server)
        await self._http.start()
        self._tasks = [
            asyncio.create_task(_vital(router.watch())),
            asyncio.create_task(_vital(_report_health(router, health_service))),
        ]
        return addresses

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
        # The clients first: a request that ends now is reported as such, not as a lost worker.
        if self._http is not None:
            await self._http.stop()
        for server in reversed(self._servers):
            await server.stop(grace=0.5)
        if self._frontend is not None:
            self._frontend.close()


def make_policy(name: str) -> RoutingPolicy:
    """The routing policy that a configuration names.

    Raises:
        ValueError: there is none of that name, or its class cannot be made.
    """
    policy = ROUTING_POLICIES.load(name)
    try:
        return policy()
    except Exception as error:  # It may be anybody's class.
        raise ValueError(f"the routing policy {name} cannot be made: {error}") from error


def _serving(router: Router) -> dict[str, bool]:
    """What the standard health service says, by service: the server as a whole, for which probes ask by default, the
    inference service, and each role: whether a worker of it is connected."""
    ready = not router.not_ready_reason()
    roles = {worker.role for worker in router.workers}
    return {"": ready, SERVICE: ready} | {f"tandem.{role}": role in roles for role in ROLES}


async def _set_health(service: health.aio.HealthServicer, serving: dict[str, bool]) -> None:
    status = health_pb2.HealthCheckResponse
    for name, is_serving in serving.items():
        await service.set(name, status.SERVING if is_serving else status.NOT_SERVING)


async def _vital(task: Coroutine[Any, Any, None]) -> None:
    """Runs a task that the router cannot do without: if it fails, the process ends, which everybody sees."""
    try:
        await task
    except Exception:
        logger.exception("a vital task failed")
        logging.shutdown()
        os._exit(exit_codes.ROUTER_TASK_FAILED)


async def _report_health(router: Router, service: health.aio.HealthServicer) -> None:
    """Keeps the standard health service in step with what could be served."""
    known: dict[str, bool] = {}
    while True:
        if (serving := _serving(router)) != known:
            known = serving
            await _set_health(service, serving)
        await asyncio.sleep(HEALTH_INTERVAL_S)

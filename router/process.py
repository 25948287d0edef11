"""The router's process: its loop's thread and its two servers."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.cluster import ClusterService
from router.frontends.grpc import InferenceService
from router.policies.registry import make_policy
from router.router import Router
from router.tokenization import Tokenizer
from tandem.config import RouterConfig
from tandem.rpc.auth import cluster_gate
from tandem.rpc.channel import bind, new_server
from tandem.rpc.loop_thread import LoopThread
from tandem.v1 import inference_pb2, inference_pb2_grpc, worker_pb2_grpc

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
logger = logging.getLogger(__name__)

EXIT_TASK_FAILED = 73
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0


class RouterAddresses(NamedTuple):
    grpc: str
    cluster: str


class RouterProcess:
    """One router, from its start to its stop; called from one thread that is not its loop's."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._loop_thread = LoopThread()
        self._servers: list[grpc.aio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> RouterAddresses:
        """Opens both ports.

        Raises:
            ValueError: a port is taken, or the model directory has no usable tokenizer.
        """
        self._loop_thread.start()
        return self._loop_thread.call(self._serve(), START_TIMEOUT_S)

    def stop(self) -> None:
        if self._loop_thread.loop is not None:
            self._loop_thread.call(self._close(), STOP_TIMEOUT_S)
            self._loop_thread.stop()

    async def _serve(self) -> RouterAddresses:
        config = self._config
        tokenizer = Tokenizer(Path(config.model_dir))
        router = Router(config, make_policy(config.routing))
        clients = new_server(max_receive_bytes=config.max_body_bytes)
        workers = new_server([cluster_gate(config.cluster_token)])
        health_service = health.aio.HealthServicer()
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(router, tokenizer, config), clients)
        health_pb2_grpc.add_HealthServicer_to_server(health_service, clients)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), clients)
        worker_pb2_grpc.add_ClusterServicer_to_server(ClusterService(router), workers)
        addresses = RouterAddresses(
            bind(clients, config.host, config.grpc_port), bind(workers, config.cluster_host, config.cluster_port)
        )
        await _set_health(health_service, serving=False)
        for server in (workers, clients):
            await server.start()
            self._servers.append(server)
        self._tasks = [
            asyncio.create_task(_vital(router.watch())),
            asyncio.create_task(_vital(_report_health(router, health_service))),
        ]
        return addresses

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        # The clients first: a request that ends now is reported as such, not as a lost worker.
        for server in reversed(self._servers):
            await server.stop(grace=0.5)


async def _set_health(service: health.aio.HealthServicer, serving: bool) -> None:
    """For the service by its name and for the server as a whole, which probes ask for by default."""
    status = health_pb2.HealthCheckResponse
    for name in (SERVICE, ""):
        await service.set(name, status.SERVING if serving else status.NOT_SERVING)


async def _vital(task: Coroutine[Any, Any, None]) -> None:
    """Runs a task that the router cannot do without: if it fails, the process ends, which everybody sees."""
    try:
        await task
    except Exception:
        logger.exception("a vital task failed")
        logging.shutdown()
        os._exit(EXIT_TASK_FAILED)


async def _report_health(router: Router, service: health.aio.HealthServicer) -> None:
    """Keeps the standard health service in step with whether a request could be served."""
    serving = False
    while True:
        if serving == bool(router.registry.not_ready_reason()):
            serving = not serving
            await _set_health(service, serving)
        await asyncio.sleep(0.1)

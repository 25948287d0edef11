"""The gRPC and the HTTP server of one pair of client ports."""

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.types import ASGIApp

from tandem.router.config import RouterConfig
from tandem.router.frontends.admin.grpc import AdapterAdmin
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.embedding import max_input_tokens
from tandem.router.frontends.encoded_request import check_encoded, check_encoded_inputs
from tandem.router.frontends.grpc import InferenceService, api_key_auth
from tandem.router.frontends.health import HealthService
from tandem.router.frontends.intake import IntakeInterceptor
from tandem.router.frontends.malformed import MalformedRequestInterceptor
from tandem.router.frontends.openai.server import HttpServer
from tandem.router.frontends.reflection import add_reflection
from tandem.router.frontends.tracing import TracingService
from tandem.router.observe.recordings import Recordings
from tandem.rpc.channel import bind, new_client_facing_server
from tandem.rpc.tls import ClientPortTls
from tandem.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    recording_pb2,
    recording_pb2_grpc,
)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
EMBED = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods_by_name["Embed"].name
ADAPTERS_SERVICE = adapters_pb2.DESCRIPTOR.services_by_name["AdapterAdmin"].full_name
TRACING_SERVICE = recording_pb2.DESCRIPTOR.services_by_name["Tracing"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
STOP_GRACE_S = 0.5
# The launcher ends a leaving router earlier.
LEAVE_LIMIT_S = 86_400.0


class ClientServers:
    """A router has one pair of its own and one that it shares with other routers."""

    def __init__(
        self,
        frontend: Frontend,
        app: ASGIApp,
        health_service: HealthService,
        recordings: Recordings,
        config: RouterConfig,
        tls: ClientPortTls | None,
        grpc_port: int,
        http_port: int,
    ) -> None:
        """Binds the ports; 0 picks a free one. A bound gRPC port listens already.

        Raises ValueError: a port is taken.
        """

        def check(method: str, data: bytes) -> None:
            if method == EMBED:
                check_encoded_inputs(data, max_input_tokens(frontend))
            else:
                check_encoded(data, config.max_model_len)

        self._grpc = new_client_facing_server(
            [
                api_key_auth(frontend),
                IntakeInterceptor(SERVICE, frontend, health_service.places.note_key),
                MalformedRequestInterceptor(SERVICE, check),
            ],
            max_receive_bytes=config.max_body_bytes,
            max_connections=config.max_connections,
            reuse_ports=config.reuse_ports,
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(frontend), self._grpc)
        adapters_pb2_grpc.add_AdapterAdminServicer_to_server(AdapterAdmin(frontend), self._grpc)
        recording_pb2_grpc.add_TracingServicer_to_server(TracingService(frontend, recordings), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(health_service, self._grpc)
        add_reflection((SERVICE, ADAPTERS_SERVICE, TRACING_SERVICE, HEALTH_SERVICE), self._grpc)
        self._http = HttpServer(app, config.host, http_port, tls, config.max_connections, reuse_port=config.reuse_ports)
        self._leaving: asyncio.Task[None] | None = None
        self.http_address = self._http.address
        self.grpc_address = bind(self._grpc, config.host, grpc_port, tls.server_credentials() if tls else None)

    async def start(self) -> None:
        await self._grpc.start()
        await self._http.start()

    def leave(self) -> None:
        """Refuses connections and calls from now on, without a word that a client takes for the cluster's."""
        if self._leaving is None:
            self._http.leave()
            self._leaving = asyncio.create_task(self._grpc.stop(LEAVE_LIMIT_S))

    async def stop(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        await self._http.stop()
        await self._grpc.stop(STOP_GRACE_S)

"""tandem.v1.AdapterAdmin: adapters of a running cluster."""

import grpc

from tandem.router.errors import RequestError, UnknownModelError
from tandem.router.frontends.access import NO_ADMIN
from tandem.router.frontends.admin.status import loaded_adapter, loaded_adapters
from tandem.router.frontends.base import Frontend
from tandem.router.frontends.grpc import metadata_of, router_trailer, status_code
from tandem.v1 import adapters_pb2 as pb
from tandem.v1 import adapters_pb2_grpc, inference_pb2


class AdapterAdmin(adapters_pb2_grpc.AdapterAdminServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.LoadedAdapter:
        await self._check(context)
        try:
            with self._frontend.refusals_counted():
                adapter = await self._frontend.router.adapter_loading.load(
                    request.name, request.path, in_place=request.in_place
                )
            return loaded_adapter(self._frontend, request.name, adapter)
        except RequestError as error:
            refusal = status_code(error), str(error)
        return await context.abort(*refusal, router_trailer(self._frontend))

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResult:
        await self._check(context)
        try:
            with self._frontend.refusals_counted():
                await self._frontend.router.adapter_loading.unload(request.name)
            return pb.UnloadAdapterResult()
        except UnknownModelError as error:
            refusal = grpc.StatusCode.NOT_FOUND, str(error)
        except RequestError as error:
            refusal = status_code(error), str(error)
        return await context.abort(*refusal, router_trailer(self._frontend))

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadedAdapters:
        return pb.LoadedAdapters(adapters=loaded_adapters(self._frontend))

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        access = self._frontend.access
        if not access.has_admin:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, NO_ADMIN, router_trailer(self._frontend))
        try:
            with self._frontend.refusals_counted():
                access.check_admin(metadata_of(context, "authorization"))
            return
        except RequestError as error:
            refusal = status_code(error), str(error)
        await context.abort(*refusal, router_trailer(self._frontend))

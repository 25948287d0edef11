"""gRPC server reflection, under its present name and its earlier one: the messages are the same on the wire."""

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE = "grpc.reflection.v1.ServerReflection"
METHOD = "ServerReflectionInfo"
_EARLIER, _PRESENT = "v1alpha", "v1"


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Args: services: names of the services to describe."""
    _describe()
    known = (*services, reflection.SERVICE_NAME, SERVICE)
    reflection.enable_server_reflection(known, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(known).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(SERVICE, {METHOD: handler})
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))


def _describe() -> None:
    """Adds the present name's description, which the library lacks: a listed service must be describable."""
    pool = descriptor_pool.Default()
    described = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    described.name = described.name.replace(_EARLIER, _PRESENT)
    try:
        pool.FindFileByName(described.name)
    except KeyError:
        described.package = SERVICE.rpartition(".")[0]
        for message in described.message_type:
            for field in filter(lambda field: field.type_name, message.field):
                field.type_name = field.type_name.replace(_EARLIER, _PRESENT)
        for method in described.service[0].method:
            for name in ("input_type", "output_type"):
                setattr(method, name, getattr(method, name).replace(_EARLIER, _PRESENT))
        pool.AddSerializedFile(described.SerializeToString())

"""gRPC server reflection under both of its names."""

from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2 as pb

from tandem.router.config import RouterConfig
from tandem.router.process import RouterProcess

NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
TIMEOUT_S = 10.0


def ask(address: str, service: str, *requests: pb.ServerReflectionRequest) -> list[pb.ServerReflectionResponse]:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        converse = channel.stream_stream(
            f"/{service}/ServerReflectionInfo",
            pb.ServerReflectionRequest.SerializeToString,
            pb.ServerReflectionResponse.FromString,
        )
        return list(converse(iter(requests), timeout=TIMEOUT_S))


def test_services_are_listed_and_described_under_both_names(router_model_dir: Path) -> None:
    router = RouterProcess(RouterConfig(str(router_model_dir), "m", 64, grpc_port=0, http_port=0))
    try:
        address = router.start().grpc
        for name in NAMES:
            (listed,) = ask(address, name, pb.ServerReflectionRequest(list_services=""))
            services = [service.name for service in listed.list_services_response.service]
            assert {"tandem.v1.Inference", "grpc.health.v1.Health", *NAMES} <= set(services)
            asked = [pb.ServerReflectionRequest(file_containing_symbol=service) for service in services]
            for service, described in zip(services, ask(address, name, *asked), strict=True):
                file = FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
                assert service in {f"{file.package}.{inner.name}" for inner in file.service}
                types = {method.input_type for inner in file.service for method in inner.method}
                assert all(kind.startswith(f".{file.package}.") for kind in types if "reflection" in kind)
        with pytest.raises(grpc.RpcError) as refused:
            ask(address, "grpc.reflection.v2.ServerReflection", pb.ServerReflectionRequest(list_services=""))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        router.stop()

"""Workers' metrics through a router, for clusters whose internal TLS keeps Prometheus from the workers."""

from typing import Any

import grpc

from tandem.router.errors import UnavailableError
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import worker_pb2, worker_pb2_grpc

# Prometheus' timeout in deploy/monitoring/.
READ_TIMEOUT_S = 4.0


async def read_metrics(address: str, credentials: ClusterCredentials) -> bytes:
    """Returns the metrics of the worker at an internal address. Raises UnavailableError if it does not answer."""
    try:
        async with credentials.open_channel(address) as channel:
            stub: Any = worker_pb2_grpc.WorkerAdminStub(channel)
            request = worker_pb2.ReadMetricsRequest()
            answer = await stub.ReadMetrics(request, metadata=credentials.metadata, timeout=READ_TIMEOUT_S)
            return bytes(answer.text)
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(f"the worker does not answer: {error.details()}") from error

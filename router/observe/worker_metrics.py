"""Workers' metrics, asked for at a router: where workers speak TLS with nobody but the cluster's own, Prometheus cannot
ask them itself."""

from typing import Any

import grpc

from tandem.router.errors import UnavailableError
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import worker_pb2, worker_pb2_grpc

# Prometheus gives up after as long, by what deploy/monitoring/ has.
READ_TIMEOUT_S = 4.0


async def read_metrics(address: str, credentials: ClusterCredentials) -> bytes:
    """What a worker tells Prometheus, in its text format.

    Args:
        address: the worker's, for the cluster's own.

    Raises:
        UnavailableError: it does not answer.
    """
    try:
        async with credentials.open_channel(address) as channel:
            stub: Any = worker_pb2_grpc.WorkerAdminStub(channel)
            request = worker_pb2.ReadMetricsRequest()
            answer = await stub.ReadMetrics(request, metadata=credentials.metadata, timeout=READ_TIMEOUT_S)
            return bytes(answer.text)
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(f"the worker does not answer: {error.details()}") from error

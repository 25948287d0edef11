"""Metrics of workers and page stores through a router, for clusters whose internal TLS keeps Prometheus from them."""

from typing import Any

import grpc

from tandem.router.errors import UnavailableError
from tandem.rpc.credentials import ClusterCredentials
from tandem.v1 import store_pb2_grpc, worker_pb2, worker_pb2_grpc

# Prometheus' timeout in deploy/monitoring/.
READ_TIMEOUT_S = 4.0


async def read_worker_metrics(address: str, credentials: ClusterCredentials) -> bytes:
    """Returns the metrics of the worker at an internal address. Raises UnavailableError if it does not answer."""
    return await _read(worker_pb2_grpc.WorkerAdminStub, address, credentials, "the worker")


async def read_store_metrics(address: str, credentials: ClusterCredentials) -> bytes:
    """As read_worker_metrics, of a page store."""
    return await _read(store_pb2_grpc.StoreAdminStub, address, credentials, "the page store")


async def _read(stub: Any, address: str, credentials: ClusterCredentials, what: str) -> bytes:
    try:
        async with credentials.open_channel(address) as channel:
            request = worker_pb2.ReadMetricsRequest()
            answer = await stub(channel).ReadMetrics(request, metadata=credentials.metadata, timeout=READ_TIMEOUT_S)
            return bytes(answer.text)
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(f"{what} does not answer: {error.details()}") from error

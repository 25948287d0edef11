import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tandem.deploy.host.certificates import make_certificates
from tandem.pagestore.server.server import StoreAdmin, StoreServer
from tandem.router.errors import UnavailableError
from tandem.router.observe.process_metrics import read_store_metrics, read_worker_metrics
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tandem.worker.admin import WorkerAdmin

TLS = make_certificates()


def test_workers_and_stores_answer_within_the_cluster() -> None:
    registry = CollectorRegistry()
    Gauge("answer", "What it is.", registry=registry).set(42)
    ours = ClusterCredentials("the-token", TLS)

    async def scenario() -> None:
        server = new_server([cluster_auth("the-token")])
        WorkerAdmin(lambda _: None, registry).add_to(server)
        StoreAdmin(StoreServer(lambda _: pytest.fail(), lambda: None), registry).add_to(server)
        address = bind(server, "127.0.0.1", 0, ours.for_server())
        await server.start()
        try:
            for read in (read_worker_metrics, read_store_metrics):
                assert b"\nanswer 42.0\n" in await read(address, ours)
                for other in (ClusterCredentials("another", TLS), ClusterCredentials("the-token", make_certificates())):
                    with pytest.raises(UnavailableError, match="does not answer: "):
                        await read(address, other)
        finally:
            await server.stop(grace=0.0)

    asyncio.run(scenario())


def test_missing_worker() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(UnavailableError, match="Connection refused"):
            asyncio.run(read_worker_metrics(address, ClusterCredentials()))
